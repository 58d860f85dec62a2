"""What every command promises, by walking the command tree: JSON, exit codes, help, variables, pages, completions."""

from dataclasses import dataclass
from typing import Any

import pytest

from kvstore.store import Store
from tests.support.running.amem import Amem, lines
from tools import manual, shells
from tools.tree import Command, root

TREE = root()
COMMANDS = {command.name: command for command in TREE.all()}
LEAVES = {name: command for name, command in COMMANDS.items() if not command.commands}

# A command line of each that can be read, about an agent or a model that is not there, and how it ends in a store that
# has no such thing, and without a store. What only reads fails for want of a store; `prefill` wants a model first.
MISSING: dict[str, tuple[tuple[str, ...], int, int]] = {
    "prefill": (("none", "no-file.txt"), 4, 4),
    "chat": (("none", "hello"), 4, 10),
    "extend": (("none", "no-file.txt"), 4, 4),
    "snapshot": (("none",), 4, 10),
    "restore": (("none@s",), 4, 10),
    "fork": (("none", "new"), 4, 10),
    "inspect": (("none",), 4, 10),
    "log": (("none",), 4, 10),
    "diff": (("a", "none"), 4, 10),
    "rm": (("none",), 4, 10),
    "gc": ((), 0, 10),
    "verify": (("none",), 4, 10),
    "repair": (("none",), 4, 10),
    "batch": (("no-file",), 4, 4),
    "export": (("none", "-o", "file"), 4, 10),
    "import": (("no-file",), 4, 4),
    "model add": (("name", "no-file.gguf"), 4, 4),
    "model ls": ((), 0, 0),
    "model rm": (("none",), 4, 4),
    "model check": (("no-file.json",), 4, 4),
    "model plan": (("no-file.json", "--memory", "1G"), 4, 4),
    "doctor": ((), 0, 0),
    "demo": (("--tokens", "0"), 2, 2),
}


@dataclass(frozen=True)
class Ended:
    """How a command with `--json` ended."""

    code: int
    last: dict[str, Any]


def run(amem: Amem, command: Command, *arguments: str) -> Ended:
    """Run a command, and hold what it did against what every command promises."""
    done = amem(*command.path, "--json", *arguments)
    told = lines(done)  # each line of standard output is JSON
    assert all("type" in line for line in told)
    last = told[-1]
    if last["type"] == "error":
        assert (done.returncode, list(last)) == (last["exit"], ["type", "code", "exit", "message", "hint"])
        assert done.stderr.startswith("amem: ")
    else:
        assert last["type"] == "result"
        assert last["command"] in (command.name, "help")
        assert last["ok"] is (done.returncode == 0)
    assert not {"result", "error"}.intersection(line["type"] for line in told[:-1])
    page = TREE.commands[[below.path for below in TREE.commands].index(command.path[:1])]
    assert done.returncode in manual.exit_codes(page), f"the page of {command.name} does not tell that exit code"
    return Ended(done.returncode, last)


def test_the_table_is_the_tree() -> None:
    assert set(MISSING) == set(LEAVES)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("name", LEAVES)
def test_what_is_not_there_is_told(amem: Amem, name: str) -> None:
    arguments, in_a_store, _ = MISSING[name]
    assert run(amem, LEAVES[name], *arguments).code == in_a_store


@pytest.mark.parametrize("name", LEAVES)
def test_no_store_is_told(amem: Amem, name: str) -> None:
    arguments, _, without_one = MISSING[name]
    assert run(amem, LEAVES[name], *arguments).code == without_one


@pytest.mark.parametrize("name", LEAVES)
def test_a_bad_option_is_a_usage_error(amem: Amem, name: str) -> None:
    ended = run(amem, LEAVES[name], *MISSING[name][0], "--no-such-option")
    assert (ended.code, ended.last["code"]) == (2, "usage")


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.commands and name])
def test_a_group_without_a_command_is_a_usage_error(amem: Amem, name: str) -> None:
    for arguments in ((), ("no-such-command",)):
        ended = run(amem, COMMANDS[name], *arguments)
        assert (ended.code, ended.last["code"]) == (2, "usage")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name])
def test_help_is_text_or_one_object(amem: Amem, name: str) -> None:
    command = COMMANDS[name]
    text = amem(*command.path, "--help")
    assert (text.returncode, text.stderr) == (0, "")
    assert text.stdout.startswith(f"Usage: amem {name} ")
    assert all(flag in text.stdout for option in command.all_options for flag in option.flags)
    ended = run(amem, command, "--help")
    assert (ended.last["command"], ended.last["topic"]) == ("help", f"amem {name}")
    assert ended.last["help"] + "\n" == text.stdout


@pytest.mark.parametrize("arguments", [("--json", "--help"), ("--help", "--json")])
def test_the_help_of_amem_itself(amem: Amem, arguments: tuple[str, ...]) -> None:
    [result] = lines(amem(*arguments))
    assert (result["ok"], result["topic"]) == (True, "amem")
    assert all(command.path[0] in result["help"] for command in TREE.commands)


@pytest.mark.parametrize("before", [("--json", "model", "ls"), ("model", "--json", "ls"), ("model", "ls", "--json")])
def test_shared_options_stand_anywhere(amem: Amem, before: tuple[str, ...]) -> None:
    [result] = lines(amem(*before))
    assert (result["command"], result["ok"]) == ("model ls", True)


def test_the_nearest_store_is_meant(amem: Amem, store: Store, environment: dict[str, str]) -> None:
    here = environment["AMEM_STORE"]
    assert amem("--store", "none", "inspect", "--store", here, env={"AMEM_STORE": ""}).returncode == 0
    assert amem("--store", here, "inspect", "--store", "none", env={"AMEM_STORE": here}).returncode == 10
    assert store.agents()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_its_variable(name: str) -> None:
    command = COMMANDS[name]
    shared = {option.flags for option in TREE.shared if option.variable}
    for option in command.all_options:
        flag = option.flags[-1]
        if flag in ("--help", "--version"):
            continue
        if option.flags in shared and name:
            assert option.variable is None  # read once, before the command
        else:
            assert option.variable == f"AMEM_{flag[2:].replace('-', '_').upper()}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_and_completed(name: str) -> None:
    command = COMMANDS[name]
    page = manual.pages()[f"{manual.name(command.path[:1])}.1"]
    scripts = shells.scripts()
    for option in command.all_options:
        assert option.help.endswith(".") or option.metavar
        if name and option in command.shared:
            continue
        for flag in option.flags:
            assert f"\\fB{manual.escape(flag)}\\fP" in page
            assert all(flag.lstrip("-") in script for script in scripts.values())
    assert all(argument.help for argument in command.arguments)
