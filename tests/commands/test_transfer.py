"""`export` and `import`, from store to store."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

from kvstore.format.kinds import BLOCK
from kvstore.naming import Ref
from kvstore.store import Store
from tests.commands.conftest import ACTOR
from tests.support.making import commit
from tests.support.models.endless import endless_model
from tests.support.running import children
from tests.support.running.amem import Amem, lines


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with the agent `a`: two states, of 300 and 700 tokens."""
    made = Store.open_or_create(tmp_path / "store", ACTOR)
    commit(made, "a", range(300))
    commit(made, "a", range(700))
    return made


@pytest.fixture
def other(tmp_path: Path) -> str:
    return str(tmp_path / "other")


def test_an_agent_goes_from_store_to_store(amem: Amem, store: Store, tmp_path: Path, other: str) -> None:
    done = amem("export", "a", "-o", "a.tar", "--json")
    [result] = lines(done)
    data = (tmp_path / "a.tar").read_bytes()
    assert (done.returncode, result["bytes"]) == (0, len(data))
    assert result["sha256"] == hashlib.sha256(data).hexdigest()
    assert result["state"] == f"sha256:{store.agent('a').manifest}"
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []
    made = amem("import", "a.tar", "--store", other, "--json")
    [result] = lines(made)
    assert (made.returncode, result["agent"], result["tokens"], result["new_blocks"]) == (0, "a", 700, result["blocks"])
    assert amem("import", "a.tar", "--store", other).returncode == 5
    assert amem("import", "a.tar", "b", "--store", other).returncode == 5
    again = amem("import", "a.tar", "b", "--as-new", "--store", other)
    assert (again.returncode, again.stdout) == (0, "b\n")
    assert amem("import", "a.tar", "c", "--domain", "team", "--store", other).returncode == 5  # the same id
    assert amem("import", "a.tar", "c", "--domain", "team", "--as-new", "--store", other).returncode == 0


@pytest.mark.usefixtures("store")
def test_through_a_pipe(environment: dict[str, str], amem: Amem, tmp_path: Path, other: str) -> None:
    shell = f'"$PYTHON" -m amem_cli export a --lineage | "$PYTHON" -m amem_cli import - b --store {other}'
    env = {**environment, "PYTHON": sys.executable}
    done = children.run("bash", "-o", "pipefail", "-c", shell, env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "b\n")
    assert len([line for line in lines(amem("log", "b", "--store", other, "--json")) if line["type"] == "commit"]) == 3


@pytest.mark.usefixtures("store")
def test_a_failed_import_leaves_no_agent(amem: Amem, tmp_path: Path, other: str) -> None:
    amem("export", "a", "-o", "a.tar")
    data = (tmp_path / "a.tar").read_bytes()
    for name, wrong in (("short", data[:-1]), ("long", data + b"x"), ("flipped", data[:9000] + b"?" + data[9001:])):
        (tmp_path / name).write_bytes(wrong)
        refused = amem("import", name, "--store", other, "--json")
        assert (refused.returncode, lines(refused)[-1]["code"]) == (8, "damage")
    assert lines(amem("inspect", "--store", other, "--json"))[-1]["agents"] == 0
    assert amem("import", "nothing", "--store", other).returncode == 4


@pytest.mark.usefixtures("store")
def test_an_erased_agent_does_not_return(amem: Amem) -> None:
    amem("export", "a", "-o", "a.tar")
    amem("rm", "a", "--erase")
    refused = amem("import", "a.tar")
    assert refused.returncode == 5
    assert "erased" in refused.stderr


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "a", "--json"),
        ("export", "a", "--format", "zip"),
        ("export", "a", "--format", "mlx-lm", "--lineage", "-o", "x"),
        ("import", "x", "../b"),
        ("import", "x", "--format", "mlx-lm"),
        ("import", "x", "b", "--format", "mlx-lm"),
        ("import", "-", "b", "--format", "mlx-lm", "--model", "m"),
        ("import", "x", "b", "--format", "mlx-lm", "--model", "m", "--as-new"),
    ],
)
def test_what_makes_no_sense_is_refused(amem: Amem, arguments: tuple[str, ...]) -> None:
    assert amem(*arguments).returncode == 2


@pytest.mark.usefixtures("store")
def test_an_export_that_fails_leaves_no_file(amem: Amem, store: Store, tmp_path: Path) -> None:
    state = store.resolve(Ref("a"))
    store.layout.object(state.agent.domain, BLOCK, store.blocks(state.manifest)[-1].sha256).unlink()
    (tmp_path / "a.tar").write_bytes(b"before")
    assert amem("export", "a", "-o", "a.tar").returncode == 8
    assert (tmp_path / "a.tar").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "store"]
    assert amem("export", "nobody", "-o", "b.tar").returncode == 4


def test_a_prompt_cache_there_and_back(amem: Amem, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = str(endless_model(folder))
    assert amem("prefill", "t", "--model", model, stdin=b"The quick brown fox. " * 20).returncode == 0
    done = amem("export", "t", "--format", "mlx-lm", "-o", "t.safetensors", "--json")
    [result] = lines(done)
    assert done.returncode == 0
    assert "dequantized from" in result["loss"] and "dequantized from" in done.stderr
    back = amem("import", "t.safetensors", "u", "--format", "mlx-lm", "--model", model, "--json")
    [result] = lines(back)
    assert back.returncode == 0
    assert result["claimed_model"]["parts"]["weights"] and result["loss"]["keys"] > 0
    assert "was not checked" in back.stderr
    assert amem("chat", "u", "hello", "--max-tokens", "3").returncode == 0
    (tmp_path / "ids.json").write_text(json.dumps({"no": "list"}))
    wrong = amem("import", "t.safetensors", "v", "--format", "mlx-lm", "--model", model, "--tokens", "ids.json")
    assert wrong.returncode == 2
