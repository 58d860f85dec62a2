"""The man pages: what is committed is what the commands make, and roff's own checkers have nothing against it."""

import re
import shutil
from pathlib import Path

import pytest

from kvstore import errors
from tests.support.running import children
from tools.__main__ import ROOT, generated
from tools.manual import _text, escape, exit_codes, name
from tools.tree import KINDS, kind_of, root

MAN = ROOT / "man"
PAGES = sorted(MAN.glob("*.1"))
SECTIONS = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "EXAMPLES", "SEE ALSO"]


def test_the_committed_pages_are_what_the_commands_make() -> None:
    made = {path: text for path, text in generated().items() if path.parent == MAN}
    assert {path: path.read_text("utf-8") for path in MAN.iterdir()} == made, "run `make shell`"


def test_every_command_has_its_page() -> None:
    tree = root()
    assert {path.stem for path in PAGES} == {name(command.path) for command in (tree, *tree.commands)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_complete(page: Path) -> None:
    found = re.findall(r"^\.SH (.+)$", page.read_text("utf-8"), re.MULTILINE)
    assert [title for title in found if title in SECTIONS] == SECTIONS
    if page.name == "amem.1":
        assert {"NAMING STATES", "ENVIRONMENT", "FILES", "COMMANDS"} <= set(found)


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed")
def test_groff_warns_of_nothing() -> None:
    for page in PAGES:
        done = children.run("groff", "-ww", "-man", "-Tutf8", "-z", page)
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), page.name


@pytest.mark.skipif(not shutil.which("mandoc"), reason="mandoc is not installed")
def test_mandoc_warns_of_nothing() -> None:
    done = children.run("mandoc", "-T", "lint", *PAGES)
    assert done.stdout + done.stderr == ""


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed")
@pytest.mark.parametrize("text", ["a.b .c\n.d 'e'\n'f'", r"back\slash \fB -- ~ ^ `", "ö … — and ''"])
def test_what_is_escaped_comes_out_unchanged(text: str) -> None:
    page = f".TH A 1\n.SH NAME\n.nf\n{escape(text)}\n"
    done = children.run("groff", "-man", "-Tutf8", "-P-cbou", stdin=page.encode(), check=True)
    shown = [line.strip() for line in done.stdout.splitlines()]
    assert [line for line in text.splitlines() if line not in shown] == []


def test_an_entry_without_a_term_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a term"):
        list(_text("- no term here"))


def test_amem_itself_has_all_exit_codes_and_commands_have_some() -> None:
    tree = root()
    everything = {0, 1} | {kind.exit_code for kind in errors.AmemError.__subclasses__()}
    assert set(exit_codes(tree)) == everything
    for command in tree.commands:
        assert {0, 1, 2, 4} <= set(exit_codes(command)) <= everything


def test_every_value_of_a_command_line_is_completed_or_known_to_be_free() -> None:
    kinds = {
        *(kind_of(argument.metavar) for command in root().all() for argument in command.arguments),
        *(option.kind for command in root().all() for option in command.all_options),
    }
    assert kinds == {"", *KINDS.values()}
    with pytest.raises(KeyError):
        kind_of("SOMETHING")
