"""`doctor` is of use on any machine, and `model` needs none of MLX."""

from pathlib import Path

from kvstore.store import Store
from tests.support.running.amem import Amem, lines


def test_doctor_without_a_store(amem: Amem, tmp_path: Path) -> None:
    done = amem("doctor", "--json")
    *checks, result = lines(done)
    assert (done.returncode, result["ok"], result["failures"]) == (0, True, 0)
    assert {check["name"] for check in checks} >= {"python", "amem", "mlx", "blas", "store", "models"}
    assert not (tmp_path / "store").exists()


def test_doctor_sees_who_holds_what_and_who_may_look(amem: Amem, store: Store) -> None:
    store.layout.root.chmod(0o755)
    with store.hold("a", wait=1):
        text = amem("doctor").stdout
    assert "holds a lock since" in text
    assert "0755" in text
    assert "holds a lock" not in amem("doctor").stdout


def test_doctor_fails_on_a_store_that_cannot_be_read(amem: Amem, store: Store) -> None:
    store.layout.format.write_text("{}")
    done = amem("doctor", "--json")
    assert (done.returncode, lines(done)[-1]["ok"], lines(done)[-1]["failures"]) == (1, False, 1)


def test_doctor_works_where_mlx_does_not(amem_process: Amem, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "mlx"
    broken.mkdir(parents=True)
    (broken / "__init__.py").touch()
    (broken / "core.py").write_text("raise ImportError('no libmlx.so')")
    done = amem_process("doctor", "--json", env={"PYTHONPATH": str(broken.parent)})
    checks = lines(done)
    [mlx] = [check for check in checks if check.get("name") == "mlx"]
    assert (done.returncode, mlx["status"]) == (1, "fail")
    assert "no libmlx.so" in mlx["detail"]


def test_models_are_registered_listed_and_forgotten(amem: Amem, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert amem("model", "ls").returncode == 0
    added = amem("model", "add", "tiny", str(folder))
    assert (added.returncode, added.stdout) == (0, "tiny\n")
    assert amem("model", "add", "tiny", str(folder)).returncode == 0
    model, result = lines(amem("model", "ls", "--json"))
    assert (model["name"], model["source"], result["models"]) == ("tiny", str(folder), 1)
    assert str(folder) in amem("model", "ls").stdout
    folder.rename(tmp_path / "moved")
    assert "warn" in amem("doctor").stdout
    assert [amem("model", "rm", "tiny").returncode for _ in range(2)] == [0, 4]
