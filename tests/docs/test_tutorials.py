"""The tutorials and the how-to pages, run with a tiny model: the scripts are what their pages tell, and they hold."""

import doctest
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.commit.journal import Actor
from kvstore.naming import Ref
from kvstore.store import Store
from tests.support.running import children
from tests.support.running.amem import Done

pytestmark = pytest.mark.long

DOCS = Path(__file__).parents[2] / "docs"
HOWTO = sorted((DOCS / "howto").glob("*.md"))
PHASES = ["opening", "claim", "answer", "offer", "agreement"]
_BLOCK = re.compile(r"^```bash\n(.*?)^```$(?:\n\n?^```text\n(.*?)^```$)?", re.M | re.S)
_MARK = "\0"
_SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

needs_jq = pytest.mark.skipif(not (shutil.which("jq") and shutil.which("bash")), reason="jq or bash is not installed")


def blocks(page: Path) -> list[tuple[str, str]]:
    """The bash blocks of a page, each with the output that is shown below it ("" where none is)."""
    return _BLOCK.findall(page.read_text("utf-8"))


def bash(script: str, *arguments: Path, cwd: Path, **variables: str) -> Done:
    """Run a script with this environment's `amem`; all that it makes stands below `cwd`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AMEM_")}
    path = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", os.defpath)))
    own = {"PATH": path, "AMEM_STORE": str(cwd / "store"), "AMEM_CONFIG": os.devnull}
    done = children.run("bash", "-c", script, "bash", *arguments, cwd=cwd, env={**kept, **own, **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def opened(root: Path) -> Store:
    return Store.open(root, Actor.here("test", "0"))


@pytest.mark.parametrize("name", ["lifecycle", "negotiation"])
def test_a_tutorial_tells_its_script(name: str) -> None:
    script = (DOCS / "tutorials" / f"{name}.sh").read_text("utf-8")
    told = "\n".join(block for block, _ in blocks(DOCS / "tutorials" / f"{name}.md"))
    assert [line for line in script.splitlines()[2:] if line] == [line for line in told.splitlines() if line]
    assert len(script.splitlines()) < 70


@needs_jq
def test_lifecycle(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    script = (DOCS / "tutorials" / "lifecycle.sh").read_text("utf-8")
    done = bash(script, tmp_path, cwd=tmp_path, AMEM_MODEL=str(tiny("llama")))
    first, second = opened(tmp_path / "store"), opened(tmp_path / "second")
    assert [agent.name for agent in first.agents()] == ["clerk", "diver", "pilot"]
    clerk, morning = first.resolve(Ref("clerk")), first.resolve(Ref("clerk", snapshot="morning"))
    assert clerk.manifest.resumes == morning.digest
    assert clerk.manifest.pages == morning.manifest.pages
    assert clerk.manifest.turns[-1].label == "news"

    moved = second.resolve(Ref("harbourmaster")).manifest
    assert moved.agent == clerk.manifest.agent
    assert moved.turns[: len(clerk.manifest.turns)] == clerk.manifest.turns
    assert second.snapshots("harbourmaster")[0].manifest == morning.digest

    built = re.findall(r"^\w+: (\d+) tokens, (\d+) of them reused$", done.stdout, re.M)
    assert [int(reused) > 1000 for _, reused in built] == [False, True, True]
    assert "parted in turn 3" in done.stdout
    [resumed] = re.findall(r"^harbourmaster: (\d+) tokens reused, (\d+) prefilled$", done.stdout, re.M)
    assert int(resumed[0]) == clerk.manifest.cached and int(resumed[1]) < 64
    [freed] = re.findall(r"^(\d+) files, \d+ bytes freed$", done.stdout, re.M)
    assert int(freed) > 0
    assert len(re.findall(r"^\d+ files, 0 findings$", done.stdout, re.M)) == 2


@needs_jq
def test_negotiation(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    script = (DOCS / "tutorials" / "negotiation.sh").read_text("utf-8")
    done = bash(script, tmp_path, cwd=tmp_path, AMEM_MODEL=str(tiny("llama")))
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text("utf-8").split("\n") if line]
    assert len(results) == 4 + 5 * 4
    store = opened(tmp_path / "store")
    heard: dict[str, list[str | None]] = {}
    for agent in store.agents():
        manifest = store.resolve(Ref(agent.name)).manifest
        own = [result for result in results if result["agent"] == agent.name]
        assert manifest.cached == fed_once(own)
        # what was fed, pass by pass, is what the cache holds: a token that was fed twice would be one too many
        assert sum(length * count for length, count in manifest.feeds) == manifest.cached
        heard[agent.name] = [turn.label for turn in manifest.turns if turn.label]
    assert heard == {
        "fisher": ["opening", "claim", "offer", "agreement"],
        "mediator": ["claim", "answer", "offer"],
        "miller": ["opening", "answer", "offer", "agreement"],
        "town": ["opening", "claim", "answer", "agreement"],
    }
    later = [result for result in results if result["before"]]
    assert all(result["reused"] > 5 * result["prefilled"] for result in later)
    assert re.findall(r"^(\w+) \d+$", done.stdout, re.M) == [phase for phase in PHASES[::-1] if phase != "offer"]
    assert json.loads((tmp_path / "sum.json").read_text("utf-8"))["fed_twice"] == 0


def fed_once(results: list[dict[str, Any]]) -> int:
    """Tokens of one agent that came into its cache: prefilled, fed while it answered, or found when it was made."""
    prefilled: int = sum(result["prefilled"] for result in results)
    answered: int = sum(result["generated"] - 1 for result in results if result["generated"])
    return prefilled + answered + int(results[0]["reused"])


@needs_jq
@pytest.mark.parametrize("page", HOWTO, ids=lambda page: page.stem)
def test_howto(page: Path, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    found = blocks(page)
    assert found
    script = "set -euo pipefail\n" + "".join(f"{commands}printf '\\0'\n" for commands, _ in found)
    printed = bash(script, cwd=tmp_path, model=str(tiny("llama"))).stdout.split(_MARK)
    for (commands, shown), got in zip(found, printed, strict=False):
        if shown:
            agrees = doctest.OutputChecker().check_output(shown, got, _SHOWN)
            assert agrees, f"{commands}\nshown: {shown}\nprinted: {got}"
