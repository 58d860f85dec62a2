"""Real commands that want the same agent, or the same text, at the same time."""

import json
import subprocess
from pathlib import Path

import pytest

from kvstore.store import Store
from tests.commands.conftest import ACTOR
from tests.support.running import children
from tests.support.running.amem import COMMAND, Amem

pytestmark = pytest.mark.long


def start(environment: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return children.start(*COMMAND, "--json", *arguments, env=environment, **pipes)


def finish(process: subprocess.Popen[bytes]) -> tuple[int, dict[str, object]]:
    out, _ = process.communicate(timeout=children.LIMIT)
    return process.returncode, json.loads(out.splitlines()[-1])


def test_two_that_chat_with_one_agent_lose_no_turn(amem: Amem, environment: dict[str, str], model: Path) -> None:
    """Those that wait follow one another; one that does not is told that the agent is busy. Nothing is lost."""
    amem("prefill", "a", "--model", str(model), stdin=b"hello there")
    start_tokens = amem("inspect", "a", "--json")
    before = json.loads(start_tokens.stdout.rstrip().rsplit("\n", 1)[-1])["tokens"]
    said = [start(environment, "chat", "a", f"turn {n}", "--max-tokens", "40", "--wait", "60") for n in range(2)]
    said += [start(environment, "chat", "a", "at once", "--max-tokens", "40", "--wait", "0")]
    ended = [finish(process) for process in said]
    assert [code for code, _ in ended[:2]] == [0, 0]
    assert ended[2][0] in (0, 11)
    done = [result for code, result in ended if code == 0]
    heads = {result["before"]: result["manifest"] for result in done}
    assert len(heads) == len(done)  # each followed another state
    store = Store.open(Path(environment["AMEM_STORE"]), ACTOR)
    head = store.agent("a").manifest
    assert f"sha256:{head}" in heads.values()
    tokens = store.manifest(store.agent("a").domain, head).tokens
    gained = sum(int(str(result["prefilled"])) + int(str(result["generated"])) - 1 for result in done)
    assert tokens == before + gained
    assert amem("verify", "--deep").returncode == 0


def test_eight_prefills_of_one_prompt_store_its_blocks_once(
    amem: Amem, environment: dict[str, str], model: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("All of them read the same. " * 40)
    amem("prefill", "first", "--model", str(model), "--domain", "team", stdin=b"x")
    arguments = ("--model", str(model), "--domain", "team")
    readers = [start(environment, "prefill", f"r{n}", str(text), *arguments) for n in range(8)]
    assert [finish(process)[0] for process in readers] == [0] * 8
    store = Store.open(Path(environment["AMEM_STORE"]), ACTOR)
    agents = [store.agent(f"r{n}") for n in range(8)]
    blocks = {row.sha256 for agent in agents for row in store.blocks(store.manifest(agent.domain, agent.manifest))}
    assert len({agent.domain for agent in agents}) == 1
    assert len(blocks) == 4  # 1,080 bytes and a few, a token each
    on_disk = {path.stem for path in store.layout.domain(agents[0].domain).glob("blocks/*/*")}
    assert on_disk == blocks
    assert amem("verify").returncode == 0
