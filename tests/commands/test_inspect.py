"""`inspect` of stores, domains, states and digests on real stores, and its `--text` with a real tokenizer."""

from pathlib import Path

import pytest

from kvstore import lifecycle
from kvstore.disk import files
from kvstore.format.kinds import BLOCK, MANIFEST, PAGE
from kvstore.naming import Ref
from kvstore.store import Store
from tests.commands.conftest import put_state
from tests.support.running.amem import COMMAND, Amem, lines
from tests.support.running.terminal import on_terminal

PROMPT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhel\x1b[31mlo"


def block_of(store: Store, name: str) -> str:
    return store.blocks(store.resolve(Ref(name)).manifest)[0].sha256


def test_a_state_has_its_own_bytes(amem: Amem, store: Store) -> None:
    lifecycle.fork(store, Ref("a", back=1), "b", None)
    agent, early = lines(amem("inspect", "a~1", "--json"))
    _, late = lines(amem("inspect", "a", "--json"))
    assert agent["bytes"] == late["bytes"] == late["own_bytes"] + late["shared_bytes"]
    assert early["bytes"] < late["bytes"]
    assert early["bytes"] == early["own_bytes"] + early["shared_bytes"]
    # b has the one block and the page of a~1, and a manifest of its own
    manifest = store.layout.object(store.agent("a").domain, MANIFEST, store.resolve(Ref("a", back=1)).digest)
    assert early["own_bytes"] == manifest.stat().st_size
    assert late["own_bytes"] > 0 and late["shared_bytes"] > 0


def test_a_domain_has_its_agents(amem: Amem, store: Store) -> None:
    put_state(store, "b", range(10))
    lifecycle.fork(store, Ref("a"), "c", None)
    domain = store.agent("a").domain
    *agents, result = lines(amem("inspect", "--domain", domain, "--json"))
    assert [agent["name"] for agent in agents] == ["a", "c"]
    assert (result["domain"]["id"], result["agents"], result["blocks"]) == (domain, 2, 2)
    store.create_domain("Empty")
    empty = amem("inspect", "--domain", "Empty")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert "no agents in domain Empty" in empty.stderr
    assert amem("inspect", "--domain", "none").returncode == 4
    assert amem("inspect", "b", "--domain", domain).returncode == 4
    assert amem("inspect", "a", "--domain", domain).returncode == 0


def test_a_block_and_who_needs_it(amem: Amem, store: Store) -> None:
    sha256 = block_of(store, "a")
    lifecycle.snapshot(store, Ref("a", back=1), "s", None)
    put_state(store, "b", range(300))
    [result] = lines(amem("inspect", f"sha256:{sha256[:12]}", "--json"))
    path = store.layout.object(store.agent("a").domain, BLOCK, sha256)
    assert (result["kind"], result["digest"], result["bytes"]) == ("block", f"sha256:{sha256}", path.stat().st_size)
    assert (result["group"], result["position"], result["held_by"]) == ("full-0", 0, ["a", "a@s"])
    text = amem("inspect", f"sha256:{sha256[:12]}").stdout
    assert "held by    a, a@s" in text
    assert amem("inspect", f"sha256:{sha256[:12]}", "--text").returncode == 2
    assert amem("inspect", f"sha256:{sha256[:12]}", "--domain", store.agent("b").domain).returncode == 4


def test_pages_and_the_states_of_agents_that_are_gone(amem: Amem, store: Store) -> None:
    state = store.resolve(Ref("a"))
    [page] = state.manifest.pages
    [result] = lines(amem("inspect", f"sha256:{page.sha256}", "--json"))
    assert (result["kind"], result["position"], result["tokens"], result["held_by"]) == ("page", 0, 700, ["a"])
    put_state(store, "b", range(10))
    assert amem("rm", "a").returncode == 0
    [gone] = lines(amem("inspect", f"sha256:{state.digest}", "--json"))
    assert (gone["kind"], gone["tokens"], gone["held_by"]) == ("manifest", 700, [])


def test_an_ambiguous_digest_is_a_usage_error(amem: Amem, store: Store) -> None:
    sha256 = block_of(store, "a")
    path = store.layout.object(store.agent("a").domain, BLOCK, sha256)
    files.write_new(path.with_name(f"{sha256[:20]}{'0' * 44}.safetensors"), [b""])
    done = amem("inspect", f"sha256:{sha256[:20]}")
    assert done.returncode == 2
    assert "2 digests" in done.stderr
    assert amem("inspect", f"sha256:{sha256}").returncode == 0


def test_a_damaged_block_is_shown_by_its_name_alone(amem: Amem, store: Store) -> None:
    path = store.layout.object(store.agent("a").domain, BLOCK, block_of(store, "a"))
    path.chmod(0o600)
    path.write_bytes(b"short")
    assert amem("inspect", f"sha256:{path.stem}").returncode == 8
    assert amem("inspect", "a").returncode == 0  # no block is read


def test_one_agent_does_not_need_the_pages_of_others(amem: Amem, store: Store) -> None:
    put_state(store, "b", range(300))
    [page] = store.resolve(Ref("b")).manifest.pages
    files.unlink(store.layout.object(store.agent("b").domain, PAGE, page.sha256))
    assert amem("inspect", "a").returncode == 0
    assert amem("inspect", "b").returncode == 8
    assert amem("inspect").returncode == 8


@pytest.mark.parametrize("arguments", [("--text",), ("--raw", "a"), ("a@",), ("sha256:xyz",), ("sha256:abc",)])
@pytest.mark.usefixtures("store")
def test_what_makes_no_sense_is_a_usage_error(amem: Amem, arguments: tuple[str, ...]) -> None:
    assert amem("inspect", *arguments).returncode == 2


@pytest.mark.usefixtures("store")
def test_lines_fit_a_narrow_terminal_but_for_digests(amem: Amem) -> None:
    long = [line for line in amem("inspect", "a").stdout.splitlines() if len(line) > 60]
    assert all("sha256:" in line for line in long)


def test_text_is_what_was_said_and_raw_the_prompt(amem: Amem, environment: dict[str, str], model: Path) -> None:
    made = amem("prefill", "t", "--model", str(model), "--system", "Be brief.", stdin=b"hel\x1b[31mlo\n")
    assert made.returncode == 0, made.stderr
    assert amem("inspect", "t", "--text").stdout == "[system] Be brief.\n[user] hel\x1b[31mlo\n"
    system, user, result = lines(amem("inspect", "t", "--text", "--json"))
    assert (system["type"], system["role"], system["text"]) == ("text", "system", "Be brief.")
    assert (user["role"], user["text"], result["turns"]) == ("user", "hel\x1b[31mlo", 2)
    assert amem("inspect", "t", "--text", "--raw").stdout == f"{PROMPT}\n"
    assert lines(amem("inspect", "t", "--text", "--raw", "--json"))[-1]["text"] == PROMPT
    shown = on_terminal(*COMMAND, "inspect", "t", "--text", "--raw", env=environment)
    assert "\x1b" not in shown
    assert "hel\\x1b[31mlo" in shown


@pytest.mark.usefixtures("store")
def test_a_table_that_does_not_fit_becomes_paragraphs(environment: dict[str, str]) -> None:
    command = (*COMMAND, "inspect")
    narrow = on_terminal(*command, env={**environment, "COLUMNS": "50"}).replace("\r", "").splitlines()
    assert narrow[:3] == ["a", "  MODEL    tiny", "  TOKENS   700"]
    wide = on_terminal(*command, env={**environment, "COLUMNS": "120"})
    assert "SNAPS" in wide.splitlines()[0]
