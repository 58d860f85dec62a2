"""The command line itself: its table, its options, its errors, its exit codes."""

import errno
import os
import re
import signal
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import amem_cli.commands
from amem_cli.main import COMMANDS
from amem_cli.shell.error_boundary import to_amem_error
from kvstore import errors
from kvstore.store import Store
from tests.commands.conftest import ACTOR
from tests.support.running import children
from tests.support.running.amem import COMMAND, Amem, lines

HEAVY = ("mlx", "mlx_lm", "transformers", "numpy", "huggingface_hub", "pydantic")
LOADED = """
import sys
from amem_cli.main import run
try:
    run()
finally:
    print(*sorted(sys.modules), file=open({report!r}, "w"))
"""


def test_the_table_is_the_modules() -> None:
    folder = Path(amem_cli.commands.__path__[0])
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {name.removesuffix("_") for name in modules} == set(COMMANDS)
    for name in modules:
        app = import_module(f"amem_cli.commands.{name}").app
        assert isinstance(app, typer.Typer)
        get_command(app)


def test_no_command_imports_another() -> None:
    for path in Path(amem_cli.commands.__path__[0]).glob("*.py"):
        assert not re.search(r"amem_cli\.commands|from \. import|from amem_cli import commands", path.read_text()), path


@pytest.mark.usefixtures("store")
def loaded(environment: dict[str, str], tmp_path: Path, *arguments: str) -> set[str]:
    """The modules that a run of `amem` imports."""
    report = tmp_path / "modules"
    code = LOADED.format(report=str(report))
    children.run(sys.executable, "-c", code, *arguments, env=environment)
    return set(report.read_text().split())


@pytest.mark.parametrize("arguments", [("--help",), ("inspect",), ("inspect", "a"), ("inspect", "--json")])
def test_light_commands_load_nothing_heavy(
    environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    modules = loaded(environment, tmp_path, *arguments)
    assert "amem_cli.main" in modules
    assert modules.isdisjoint(HEAVY)
    others = {f"amem_cli.commands.{name}" for name in COMMANDS if name not in arguments}
    assert modules.isdisjoint(others)


def test_exit_codes_are_unique_and_documented() -> None:
    classes: list[type[errors.AmemError]] = errors.AmemError.__subclasses__()
    documented = {2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13}
    assert {kind.exit_code for kind in classes} == documented
    everything: list[type[errors.AmemError]] = [errors.AmemError, *classes]
    codes = Counter(kind.code for kind in everything)
    assert max(codes.values()) == 1
    assert errors.AmemError.exit_code == 1


@pytest.mark.parametrize(
    ("caught", "code"),
    [
        (errors.BusyError("held"), 11),
        (MemoryError(), 13),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "f"), 13),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "f"), 1),
    ],
)
def test_expected_failures_have_their_code(caught: Exception, code: int) -> None:
    error = to_amem_error(caught)
    assert error is not None
    assert error.exit_code == code


def test_a_bug_is_no_expected_failure() -> None:
    assert to_amem_error(KeyError("x")) is None


@pytest.mark.parametrize(
    "arguments",
    [("--nope",), ("nope",), (), ("chat",), ("chat", "a", "hi", "--temp", "warm"), ("chat", "a@", "hi"), ("fork", "a")],
)
def test_usage_errors_are_exit_2_and_tell_help(amem: Amem, arguments: tuple[str, ...]) -> None:
    text = amem(*arguments)
    assert (text.returncode, text.stdout) == (2, "")
    assert text.stderr.startswith("amem: ")
    assert "\nhint: " in text.stderr
    told = amem(*arguments, "--json")
    assert told.returncode == 2
    [error] = lines(told)
    assert list(error) == ["type", "code", "exit", "message", "hint"]
    assert (error["type"], error["code"], error["exit"]) == ("error", "usage", 2)


def test_json_may_be_asked_for_by_the_environment(amem: Amem) -> None:
    assert lines(amem("--nope", env={"AMEM_JSON": "1"}))[-1]["exit"] == 2
    assert amem("--nope", env={"AMEM_JSON": "0"}).stdout == ""
    assert amem("chat", "a", "--nope", "--", "--json").stdout == ""


def test_a_wrong_command_names_the_right_one(amem: Amem) -> None:
    assert "inspect" in amem("inpsect").stderr


def test_help_and_version(amem: Amem) -> None:
    shown = amem("--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in COMMANDS)
    for name in COMMANDS:
        done = amem(name, "--help")
        assert (done.returncode, done.stderr) == (0, "")
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert f'version = "{amem("--version").stdout.split()[1]}"' in project.read_text()


def make_store(path: Path) -> str:
    Store.open_or_create(path, ACTOR)
    return str(path)


def shown_store(amem: Amem, *arguments: str, **env: str) -> str:
    done = amem(*arguments, "--json", env=env)
    return str(lines(done)[-1].get("store"))


def test_flag_before_environment_before_config(amem: Amem, tmp_path: Path) -> None:
    flag, before, variable, file = (make_store(tmp_path / name) for name in ("flag", "before", "variable", "file"))
    config = tmp_path / "config.toml"
    config.write_text(f'store = "{file}"\n')
    base = {"AMEM_CONFIG": str(config), "AMEM_STORE": ""}
    assert shown_store(amem, "inspect", **base) == file
    assert shown_store(amem, "inspect", **{**base, "AMEM_STORE": variable}) == variable
    assert shown_store(amem, "--store", before, "inspect", **{**base, "AMEM_STORE": variable}) == before
    assert shown_store(amem, "--store", before, "inspect", "--store", flag, **base) == flag


def test_the_config_file_speaks_for_one_command(amem: Amem, store: Store, tmp_path: Path) -> None:
    config = tmp_path / "config" / "amem" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('json = true\n[restore]\nexpect = "sha256:00000000"\n')
    done = amem("restore", "a~1")
    assert (done.returncode, lines(done)[-1]["exit"]) == (5, 5)
    head = store.agent("a").manifest
    assert amem("restore", "a~1", "--expect", f"sha256:{head}").returncode == 0
    assert lines(amem("inspect"))[-1]["ok"] is True


@pytest.mark.parametrize(
    "text", ["stroe = 1\n", "max-tokens = 1\n", "[inspect]\nmax-tokens = 1\n", "[nope]\na = 1\n", "store = \n"]
)
@pytest.mark.usefixtures("store")
def test_a_wrong_config_file_is_exit_2(amem: Amem, tmp_path: Path, text: str) -> None:
    config = tmp_path / "config.toml"
    config.write_text(text)
    done = amem("inspect", "--json", env={"AMEM_CONFIG": str(config)})
    assert (done.returncode, lines(done)[-1]["code"]) == (2, "usage")
    assert "config.toml" in done.stderr


def test_a_config_file_that_is_named_must_exist(amem: Amem, tmp_path: Path) -> None:
    assert amem("inspect", env={"AMEM_CONFIG": str(tmp_path / "none")}).returncode == 4


def test_the_store_of_another_version_is_exit_10(amem: Amem, store: Store) -> None:
    store.layout.format.write_text('{"format":99,"id":"x"}')
    assert amem("inspect").returncode == 10


BUG = """
import sys
from amem_cli import main
def bug(*arguments): raise KeyError("a secret prompt")
main._dispatch = bug
sys.argv = ["amem", "inspect", *sys.argv[1:]]
main.run()
"""


def test_a_bug_leaves_a_report_without_what_was_said(environment: dict[str, str], tmp_path: Path) -> None:
    command = (sys.executable, "-c", BUG)
    done = children.run(*command, env=environment)
    assert done.returncode == 1
    assert "this is a bug: KeyError" in done.stderr
    assert "secret prompt" not in done.stderr
    [report] = (tmp_path / "state" / "amem" / "log").iterdir()
    assert report.stat().st_mode & 0o777 == 0o600
    assert "KeyError" in report.read_text()
    assert "in run" in report.read_text()
    assert str(report) in done.stderr
    loud = children.run(*command, "-v", env=environment)
    assert "Traceback" in loud.stderr


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("arguments", [("inspect",), ("inspect", "--json"), ("--version",), ("nope", "--json")])
def test_a_closed_pipe_ends_silently(environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    done = children.run(*COMMAND, *arguments, env=environment, stdout=writable)
    os.close(writable)
    assert done.returncode == -signal.SIGPIPE
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
@pytest.mark.usefixtures("store")
def test_closed_streams_do_no_harm(environment: dict[str, str], closed: str) -> None:
    done = children.run("bash", "-c", f"{sys.executable} -m amem_cli snapshot a s {closed}", env=environment)
    assert (done.returncode, done.stdout) == (0, "a@s\n")


def test_without_standard_output_nothing_is_done(environment: dict[str, str], store: Store) -> None:
    done = children.run("bash", "-c", f"{sys.executable} -m amem_cli snapshot a s >&-", env=environment)
    assert (done.returncode, store.snapshots("a")) == (1, [])
