"""README and docs, run: every command in a block marked `sh` or `console` must work, and print what is shown."""

import doctest
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.running import children

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?P<excuse><!-- not run: [^\n]+ -->\n)?^```(?P<kind>sh|console)\n(?P<text>.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
_NAMED = re.compile(r"`((?:amem_cli|benchmarks|docs|kvstore|man|completions|tests|tools)/[\w./-]+)(?:::(\w+))?`")
_EXAMPLES = re.compile(r"NAME|\.\.\.")
_SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Step:
    """A command line, and what a page shows of its standard output (None: nothing)."""

    command: str
    shown: str | None


def steps(page: str) -> list[Step]:
    """The commands of a page in order; blocks with an excuse are left out."""
    found: list[Step] = []
    for block in _BLOCK.finditer(page):
        if block["excuse"]:
            continue
        if block["kind"] == "sh":
            found += [Step(line, None) for line in block["text"].splitlines() if line]
            continue
        for part in re.split(r"^\$ ", block["text"], flags=re.M)[1:]:
            command, _, shown = part.partition("\n")
            found.append(Step(command, shown))
    return found


def pages_with_steps() -> list[Path]:
    return [page for page in PAGES if steps(page.read_text("utf-8"))]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A shell that finds this environment's `amem`, on a store of its own. Converted models stay where they are."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AMEM_")}
    path = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", os.defpath)))
    return {**kept, "PATH": path, "AMEM_STORE": str(tmp_path / "store"), "AMEM_CONFIG": os.devnull}


@pytest.mark.long
@pytest.mark.parametrize("page", pages_with_steps(), ids=lambda page: page.name)
def test_the_commands_of_a_page_do_what_it_says(page: Path, environment: dict[str, str], tmp_path: Path) -> None:
    for step in steps(page.read_text("utf-8")):
        done = children.run("sh", "-c", step.command, cwd=tmp_path, env=environment)
        assert done.returncode == 0, f"{step.command}\n{done.stdout}{done.stderr}"
        if step.shown is not None:
            agrees = doctest.OutputChecker().check_output(step.shown, done.stdout, _SHOWN)
            assert agrees, f"{step.command}\nshown: {step.shown}\nprinted: {done.stdout}"


def test_the_readme_has_commands() -> None:
    commands = [step.command for step in steps((ROOT / "README.md").read_text("utf-8"))]
    assert sum(command.startswith("amem ") for command in commands) > 8


def test_a_page_without_an_excuse_is_run() -> None:
    excused = "<!-- not run: why -->\n```sh\nfalse\n```\n"
    run = "```sh\ntrue\n```\n```console\n$ echo a\na\n$ true\n```\n"
    assert steps(excused + run + excused) == [Step("true", None), Step("echo a", "a\n"), Step("true", "")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    for path, test in _NAMED.findall(page.read_text("utf-8")):
        if not _EXAMPLES.search(path) and page.name != "CHANGELOG.md":
            assert (ROOT / path).exists(), f"{page.name} names {path}"
            assert not test or f"def {test}(" in (ROOT / path).read_text("utf-8"), f"{page.name} names {path}::{test}"


def test_every_page_stands_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "README.md" or f"]({name})" in index, f"{name} is not in docs/README.md"
