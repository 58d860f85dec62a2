"""docs/reference/json.md, held against real output: the lines of each command, and their fields in order."""

import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from amem_cli.commands.demo import DemoFigures
from kvstore.store import Store
from tests.commands.conftest import put_state
from tests.support.running.amem import Amem, lines
from tools.tree import root

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json.md"
_ROW = re.compile(r"^\| `(amem [^`]+)` \| `([a-z-]+)` \| ([^|]+) \|$", re.M)
ALWAYS = {"result": ["type", "command", "ok"]}

# Each command as the page names it, and how it is run here: on agents without a model, or with a tiny one.
WITHOUT_MODEL = {
    "amem inspect": "inspect",
    "amem inspect REF": "inspect a",
    "amem inspect DIGEST": "inspect {page}",
    "amem log AGENT": "log a",
    "amem log AGENT --graph": "log a --graph",
    "amem log": "log",
    "amem log --head": "log --head",
    "amem diff A B": "diff a a~1",
    "amem snapshot REF": "snapshot a",
    "amem fork REF NEW": "fork a b",
    "amem restore REF": "restore a~1",
    "amem rm REF": "rm a nobody",
    "amem gc": "gc --keep-history 0",
    "amem verify": "verify",
    "amem verify --erased FILE": "verify --erased certificate",
    "amem model add NAME SOURCE": "model add m folder",
    "amem model ls": "model ls",
    "amem model rm NAME": "model rm m",
    "amem doctor": "doctor",
    "amem --version": "--version",
    "amem --help": "chat --help",
}
WITH_MODEL = {
    "amem prefill AGENT": "prefill t text",
    "amem model check MODEL": "model check folder",
    "amem model plan MODEL": "model plan folder --memory 1GiB",
    "amem extend AGENT": "extend t text",
    "amem chat REF": "chat t hello --max-tokens 2",
    "amem repair REF": "repair t",
    "amem inspect REF --text": "inspect t --text",
    "amem inspect REF --text --raw": "inspect t --text --raw",
    "amem log AGENT --text": "log t --text",
    "amem diff A B --text": "diff t t~1 --text",
    "amem export REF": "export t -o t.amem",
    "amem import FILE": "import t.amem v --as-new",
    "amem export REF --format mlx-lm": "export t --format mlx-lm -o cache.safetensors",
    "amem import FILE NAME --format mlx-lm": "import cache.safetensors u --format mlx-lm --model folder",
}


def told() -> dict[str, dict[str, list[str]]]:
    """What the page tells: for each command the fields of each type of line."""
    found: dict[str, dict[str, list[str]]] = {}
    for command, kind, named in _ROW.findall(PAGE.read_text("utf-8")):
        assert kind not in found.get(command, {}), f"{command} has two rows"
        found.setdefault(command, {})[kind] = ALWAYS.get(kind, ["type"]) + re.findall(r"`(\w+)`", named)
    return found


def seen(amem: Amem, arguments: str) -> dict[str, list[str]]:
    """The fields of each type of line that a command writes; lines of a type have the same."""
    found: dict[str, list[str]] = {}
    for line in lines(amem(*arguments.split(), "--json")):
        assert found.setdefault(line["type"], list(line)) == list(line)
    return found


def test_the_page_tells_every_command() -> None:
    assert set(told()) == WITHOUT_MODEL.keys() | WITH_MODEL.keys() | {"amem demo"}
    assert told()["amem demo"]["result"] == [*ALWAYS["result"], *(field.name for field in fields(DemoFigures))]


def test_every_command_has_a_row_on_the_page() -> None:
    leaves = {command.name for command in root().all() if not command.commands}
    rows = {command.removeprefix("amem ") for command in told()}
    missing = {name for name in leaves if not any(f"{row} ".startswith(f"{name} ") for row in rows)}
    assert missing == {"batch"}  # docs/howto/batch.md


def test_commands_without_a_model(amem: Amem, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    page = store.layout.domain(store.agent("a").domain) / "pages"
    digest = next(page.glob("*/*.json")).stem
    put_state(store, "gone", range(9))
    (tmp_path / "certificate").write_text(amem("rm", "gone", "--erase").stdout)
    expected = told()
    for command, arguments in WITHOUT_MODEL.items():
        if command == "amem verify":
            put_state(store, "hurt", range(300))
            block = next((store.layout.domain(store.agent("hurt").domain) / "blocks").glob("*/*"))
            block.chmod(0o600)
            block.write_bytes(block.read_bytes()[:-1])
        assert seen(amem, arguments.format(page=f"sha256:{digest}")) == expected[command], command


def test_commands_with_a_model(amem: Amem, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "folder")
    (tmp_path / "text").write_text("The cat sat on the mat. ")
    expected = told()
    for command, arguments in WITH_MODEL.items():
        named = f"{arguments} --model folder" if arguments.startswith("prefill") else arguments
        assert seen(amem, named) == expected[command], command


def test_an_error_is_told(amem: Amem) -> None:
    [error] = lines(amem("inspect", "--json"))
    row = re.search(r"^\| any \| `error` \| ([^|]+) \|$", PAGE.read_text("utf-8"), re.M)
    assert row and list(error) == ["type", *re.findall(r"`(\w+)`", row[1])]
