"""`log` and `diff` on real stores, and their `--text` with a real tokenizer."""

import hashlib
from pathlib import Path

import pytest

from amem_cli.engine.models.fingerprint import identify
from kvstore.lifecycle import fork, snapshot
from kvstore.naming import Ref, parse_ref
from kvstore.store import Store
from tests.commands.conftest import ACTOR, put_state
from tests.commands.test_main import HEAVY, loaded
from tests.commands.test_states import files_below
from tests.support.running.amem import Amem, lines

COMMIT_KEYS = (
    "type agent state op created tokens complete previous resumes origin note snapshots forks turns stop sampling"
)


@pytest.fixture
def talk(amem: Amem, model: Path) -> Amem:
    """An agent `t` that has been told `The quick fox` and has answered."""
    assert amem("prefill", "t", "--model", str(model), stdin=b"The quick fox").returncode == 0
    assert amem("chat", "t", "hello", "--max-tokens", "8", "--seed", "1").returncode == 0
    return amem


def test_log_of_an_agent(amem: Amem, store: Store) -> None:
    snapshot(store, parse_ref("a~1"), "early")
    fork(store, parse_ref("a@early"), "b", note="another way")
    newest, oldest, result = lines(amem("log", "a", "--json"))
    assert " ".join(newest) == COMMIT_KEYS
    assert (newest["tokens"], newest["turns"][0]["end"], oldest["tokens"]) == (700, 700, 300)
    assert (oldest["snapshots"], oldest["forks"]) == (["early"], ["b"])
    assert (result["agent"], result["commits"]) == ("a", 2)
    assert len(lines(amem("log", "a", "-n", "1", "--json"))) == 2
    text = amem("log", "a").stdout
    assert "@early" in text and "forked as b" in text and "tokens 0 to 700" in text
    [forked, _] = lines(amem("log", "b", "--json"))
    assert (forked["op"], forked["note"]) == ("fork", "another way")
    assert "note: another way" in amem("log", "b").stdout


def test_log_graph_draws_the_domain(amem: Amem, store: Store) -> None:
    fork(store, parse_ref("a~1"), "b")
    put_state(store, "a", range(800))
    put_state(store, "stranger", range(10))
    shown = amem("log", "a", "--graph").stdout.splitlines()
    assert [line[:3] for line in shown] == ["*  ", "| *", "|/", "*  ", "*  "]
    assert all(any(f"  {name}  " in line for name in "ab") for line in shown if "*" in line)
    *commits, result = lines(amem("log", "a", "--graph", "--json"))
    assert [commit["agent"] for commit in commits] == ["a", "b", "a", "a"]
    assert result["commits"] == 4


def test_log_alone_is_the_journal(amem: Amem, store: Store) -> None:
    amem("snapshot", "a", "s", env={"AMEM_ACTOR": "planner"})
    *entries, result = lines(amem("log", "--json"))
    assert [entry["seq"] for entry in entries] == [3, 2, 1]
    assert (entries[0]["op"], entries[0]["agent"], entries[0]["actor"]["claimed"]) == ("snapshot", "a", "planner")
    assert result["entries"] == 3
    assert len(amem("log", "-n", "2").stdout.splitlines()) == 2
    assert "as planner" in amem("log").stdout
    times = entries[1]["time"]
    assert [entry["seq"] for entry in lines(amem("log", "--json", "--since", times, "--until", times))[:-1]] == [2]
    assert len(lines(amem("log", "--json", "--since", "2h"))) == 4
    assert len(lines(amem("log", "--json", "--until", "2h"))) == 1
    last = store.layout.journal.read_bytes().splitlines()[-1]
    head = lines(amem("log", "--head", "--json"))[-1]
    assert head["digest"] == f"sha256:{hashlib.sha256(last).hexdigest()}"
    assert (head["entries"], head["bytes"]) == (3, store.layout.journal.stat().st_size)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    "arguments",
    [
        ("log", "--graph"),
        ("log", "--text"),
        ("log", "a", "--head"),
        ("log", "a", "--since", "2h"),
        ("log", "--since", "yesterday"),
        ("log", "a", "-n", "0"),
        ("log", "a", "--graph", "--text"),
        ("diff", "a"),
    ],
)
def test_what_makes_no_sense_is_refused(amem: Amem, arguments: tuple[str, ...]) -> None:
    assert amem(*arguments).returncode == 2


@pytest.mark.usefixtures("store")
def test_diff_tells_where_states_part(amem: Amem) -> None:
    done = amem("diff", "a~1", "a", "--json")
    [result] = lines(done)
    assert (done.returncode, result["common_tokens"], result["parted_at"]) == (0, 300, 300)
    assert (result["shared_blocks"], result["a"]["own_blocks"], result["b"]["own_blocks"]) == (1, 0, 1)
    assert (result["a"]["turn"], result["b"]["turn"]) == (None, {"index": 0, "role": "user", "label": None})
    assert "diverge at token 300" in amem("diff", "a~1", "a").stdout
    assert "identical, 700 in all" in amem("diff", "a", "a").stdout


def test_diff_of_domains_and_models(amem: Amem, store: Store) -> None:
    put_state(store, "b", range(700))
    [result] = lines(amem("diff", "a", "b", "--json"))
    assert (result["parted_at"], result["shared_blocks"], result["model_parts"]) == (None, 0, {})
    assert result["a"]["domain"] != result["b"]["domain"]
    assert amem("diff", "a", "nobody").returncode == 4


@pytest.mark.usefixtures("store")
def test_reading_writes_nothing(amem: Amem, tmp_path: Path) -> None:
    before = files_below(tmp_path)
    for arguments in (("log",), ("log", "a"), ("log", "a", "--graph"), ("log", "--head"), ("diff", "a", "a~1")):
        assert amem(*arguments).returncode == 0
    assert files_below(tmp_path) == before


def test_text_repeats_the_last_answer(talk: Amem) -> None:
    answer = talk("chat", "t", "and then?", "--max-tokens", "8", "--seed", "2").stdout
    assert talk("log", "t", "--text", "-n", "1").stdout == answer
    said = [line for line in lines(talk("log", "t", "--text", "--json")) if line["type"] == "text"]
    assert said[1]["text"] == answer.removesuffix("\n")
    assert any("The quick fox" in line["text"] and line["role"] == "user" for line in said)


def test_diff_text_shows_both_sides(talk: Amem) -> None:
    talk("fork", "t", "u")
    talk("chat", "t", "one", "--max-tokens", "4", "--seed", "1")
    talk("chat", "u", "two", "--max-tokens", "4", "--seed", "1")
    shown = talk("diff", "t", "u", "--text").stdout
    assert "--- t" in shown and "one" in shown and "--- u" in shown and "two" in shown


def test_another_tokenizer_is_refused(talk: Amem, model: Path, store: Store) -> None:
    present = identify(model, None, str(model), None)
    assert store.resolve(Ref("t")).manifest.model == present
    changed = model / "tokenizer_config.json"
    text = changed.read_text()
    try:
        changed.write_text(text.replace('"eos_token"', '"unk_token"'))
        refused = talk("log", "t", "--text")
    finally:
        changed.write_text(text)
    assert refused.returncode == 6
    assert "tokenizer" in refused.stderr


@pytest.mark.parametrize("arguments", [("log", "t", "--text", "-n", "1"), ("diff", "t", "t~1", "--text")])
def test_text_needs_no_mlx(talk: Amem, environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert talk(*arguments).returncode == 0
    assert loaded(environment, tmp_path, *arguments).isdisjoint({"mlx", "mlx.core", "mlx_lm"})


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("arguments", [("log",), ("log", "a", "--graph"), ("diff", "a", "a~1"), ("rm", "a", "--erase")])
def test_nothing_heavy_is_loaded(environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...]) -> None:
    heavy = set(HEAVY) - {"pydantic"}  # which Typer brings for options that are numbers or lists
    assert loaded(environment, tmp_path, *arguments).isdisjoint(heavy)


def test_log_of_an_empty_store(amem: Amem, tmp_path: Path) -> None:
    assert amem("log").returncode == 10
    Store.open_or_create(tmp_path / "store", ACTOR)
    assert lines(amem("log", "--json"))[-1]["entries"] == 0
