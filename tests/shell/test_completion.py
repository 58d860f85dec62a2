"""Completion in the shells themselves, with the names of a real store. Shells that are not installed are left out."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

import pytest

from kvstore.store import Store
from tests.commands.conftest import ACTOR, put_state
from tests.support.running import children
from tests.support.running.amem import in_this_process
from tests.support.running.terminal import Terminal
from tools.__main__ import ROOT, generated

COMPLETIONS = ROOT / "completions"
BASH = COMPLETIONS / "amem.bash"
FISH = COMPLETIONS / "amem.fish"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with the agents planner, plotter and Writer, and two snapshots of planner."""
    from kvstore import lifecycle
    from kvstore.naming import Ref

    made = Store.open_or_create(tmp_path_factory.mktemp("shell") / "a store", ACTOR)
    for name in ("planner", "plotter", "Writer"):
        put_state(made, name, range(10))
    for name in ("early", "late"):
        lifecycle.snapshot(made, Ref("planner"), name, None)
    made.create_domain("customers")
    return made


@pytest.fixture(scope="module")
def environment(store: Store) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AMEM_", "XDG_", "ZDOTDIR"))}
    path = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", os.defpath)))
    home = str(store.layout.root.parent)
    return {**kept, "PATH": path, "HOME": home, "AMEM_STORE": str(store.layout.root), "TERM": "dumb"}


def test_the_committed_scripts_are_what_the_commands_make() -> None:
    made = {path: text for path, text in generated().items() if path.parent == COMPLETIONS}
    assert {path: path.read_text("utf-8") for path in COMPLETIONS.iterdir()} == made, "run `make shell`"


def names(environment: dict[str, str], *words: str, **variables: str) -> list[str]:
    done = in_this_process("__complete", *words, stdin=b"", env={**environment, **variables}, cwd=Path.cwd())
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_names_are_those_that_the_word_begins(environment: dict[str, str]) -> None:
    assert names(environment, "agents", "") == ["Writer", "planner", "plotter"]
    assert names(environment, "refs", "pl") == ["planner", "plotter"]
    assert names(environment, "refs", "planner@") == ["planner@early", "planner@late"]
    assert names(environment, "refs", "planner@l") == ["planner@late"]
    assert names(environment, "domains", "c") == ["customers"]
    assert names(environment, "models", "") == []


def test_the_store_is_the_one_that_the_command_would_take(environment: dict[str, str], tmp_path: Path) -> None:
    root, elsewhere = environment["AMEM_STORE"], str(tmp_path / "none")
    assert names(environment, "refs", "--store", root, "pl", AMEM_STORE=elsewhere) == ["planner", "plotter"]
    assert names(environment, "refs", f"--store={root}", "pl", AMEM_STORE=elsewhere) == ["planner", "plotter"]
    config = tmp_path / "config.toml"
    config.write_text(f'store = "{root}"\n')
    assert names(environment, "refs", "pl", AMEM_STORE="", AMEM_CONFIG=str(config)) == ["planner", "plotter"]


def test_trouble_is_silent(environment: dict[str, str], tmp_path: Path) -> None:
    assert names(environment, "refs", "", AMEM_STORE=str(tmp_path / "none")) == []
    config = tmp_path / "config.toml"
    config.write_text("store = \n")
    assert names(environment, "refs", "", AMEM_STORE="", AMEM_CONFIG=str(config)) == []
    assert names(environment, "refs", "no agent@") == []


def test_names_are_found_without_typer(environment: dict[str, str]) -> None:
    code = "import sys; sys.argv[1:] = ['__complete', 'refs', '']; from amem_cli.__main__ import run; run(); "
    code += "print(*sys.modules)"
    done = children.run(sys.executable, "-c", code, env=environment)
    modules = done.stdout.splitlines()[-1].split()
    assert "amem_cli.shell.completion" in modules
    assert not {"typer", "rich", "numpy", "mlx"}.intersection(modules)


def bash(environment: dict[str, str], *words: str, replaced: str | None = None) -> list[str]:
    """What bash is offered for the last word. `replaced` is the part of it that readline puts the answer for."""
    last = words[-1] if replaced is None else replaced
    script = f"source {quote(str(BASH))}; COMP_WORDS=({' '.join(map(quote, words))}); COMP_CWORD={len(words) - 1}\n"
    script += f"""_amem amem {quote(last)} ''; printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = children.run("bash", "--noprofile", "--norc", "-c", script, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_bash_offers_what_may_stand_there(environment: dict[str, str]) -> None:
    assert bash(environment, "amem", "fo") == ["fork"]
    assert bash(environment, "amem", "--json", "mo") == ["model"]
    assert bash(environment, "amem", "model", "") == ["add", "ls", "rm", "check", "plan"]
    assert bash(environment, "amem", "chat", "pl") == ["planner", "plotter"]
    assert bash(environment, "amem", "chat", "--seed", "1", "-f", "x", "plo") == ["plotter"]
    assert bash(environment, "amem", "diff", "planner", "W") == ["Writer"]
    assert bash(environment, "amem", "chat", "planner", "pl") == []
    assert bash(environment, "amem", "chat", "--no-s") == ["--no-save"]
    assert bash(environment, "amem", "prefill", "a", "--role", "") == ["user", "assistant"]
    assert bash(environment, "amem", "prefill", "--domain", "cu") == ["customers"]
    assert bash(environment, "amem", "chat", "--", "--s") == []


def test_bash_puts_together_what_readline_parts(environment: dict[str, str]) -> None:
    assert bash(environment, "amem", "chat", "planner", "@", replaced="@") == ["@early", "@late"]
    assert bash(environment, "amem", "chat", "planner", "@", "l", replaced="@l") == ["@late"]
    assert bash(environment, "amem", "prefill", "--role", "=", "u") == ["user"]
    root = environment["AMEM_STORE"]
    elsewhere = {**environment, "AMEM_STORE": "none"}
    assert bash(elsewhere, "amem", "--store", "=", f'"{root}"', "chat", "W") == ["Writer"]


def type_into(command: Sequence[str], environment: dict[str, str], setup: str, line: str, expected: str) -> None:
    """Type `line` into a shell on a terminal, and wait until it shows what is expected."""
    with Terminal() as terminal:
        device = terminal.device
        children.start(*command, env=environment, stdin=device, stdout=device, stderr=device)
        terminal.type(f"{setup}; echo rea''dy\n".encode())
        terminal.wait_for(b"ready")
        terminal.type(line.encode())
        terminal.wait_for(re.escape(expected.encode()))


TYPED = [
    ("amem sna\t", "snapshot"),
    ("amem chat plo\t", "plotter"),
    ("amem chat planner@e\t", "planner@early"),
    ("amem prefill --role=ass\t", "--role=assistant"),
]


@pytest.mark.parametrize(("line", "expected"), TYPED)
def test_bash_on_a_terminal(environment: dict[str, str], line: str, expected: str) -> None:
    command = ["bash", "--noprofile", "--norc", "-i"]
    type_into(command, environment, f"source {quote(str(BASH))}", line, expected)


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
@pytest.mark.parametrize(("line", "expected"), [*TYPED, ("amem model r\t", "model rm"), ("amem --json fo\t", "fork")])
def test_zsh_on_a_terminal(environment: dict[str, str], tmp_path: Path, line: str, expected: str) -> None:
    setup = f"fpath=({quote(str(COMPLETIONS))} $fpath); autoload -U compinit; compinit -u -d {tmp_path}/dump"
    type_into(["zsh", "-f", "-i"], environment, setup, line, expected)


def fish(environment: dict[str, str], line: str) -> list[str]:
    script = f"source {quote(str(FISH))}; complete -C {quote(line)}"
    done = children.run("fish", "--no-config", "-c", script, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return [offer.partition("\t")[0] for offer in done.stdout.splitlines()]


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_offers_what_may_stand_there(environment: dict[str, str]) -> None:
    assert fish(environment, "amem sna") == ["snapshot"]
    assert fish(environment, "amem --json mo") == ["model"]
    assert fish(environment, "amem model ") == ["add", "check", "ls", "plan", "rm"]
    assert fish(environment, "amem chat pl") == ["planner", "plotter"]
    assert fish(environment, "amem chat planner@") == ["planner@early", "planner@late"]
    assert fish(environment, "amem chat --seed 1 plo") == ["plotter"]
    assert fish(environment, "amem diff planner W") == ["Writer"]
    assert fish(environment, "amem chat planner pl") == []
    assert fish(environment, "amem prefill --role ") == ["assistant", "user"]
    assert "--no-save" in fish(environment, "amem chat --no")


def test_install_shell_puts_everything_where_the_shells_look(tmp_path: Path) -> None:
    done = children.run("make", "-s", "-C", ROOT, "install-shell", f"DESTDIR={tmp_path}", "PREFIX=/usr")
    assert done.returncode == 0, done.stderr
    share = tmp_path / "usr" / "share"
    assert (share / "man" / "man1" / "amem-chat.1").read_bytes() == (ROOT / "man" / "amem-chat.1").read_bytes()
    assert len(list((share / "man" / "man1").iterdir())) == len(list((ROOT / "man").iterdir()))
    for place, name in (
        ("bash-completion/completions/amem", "amem.bash"),
        ("zsh/site-functions/_amem", "_amem"),
        ("fish/vendor_completions.d/amem.fish", "amem.fish"),
    ):
        assert (share / place).read_bytes() == (COMPLETIONS / name).read_bytes()
