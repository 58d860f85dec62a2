"""The engine's API as a type checker sees it: misspelt options and wrong types are errors."""

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[3]
PREAMBLE = """\
from amem_cli.engine.prompt.transcript import Text
from amem_cli.engine.turns.engine import Engine
from amem_cli.engine.turns.requests import ChatOptions, ExtendOptions, Generation, PrefillOptions, TurnResult, Watcher
from amem_cli.engine.turns.steps import Steps, do
from kvstore.naming import Ref

def good(engine: Engine, watcher: Watcher) -> list[TurnResult]:
    texts = [Text("Hello.")]
    return [
        engine.prefill("a", texts, PrefillOptions(system="You are brief.", replace=True), watcher),
        engine.extend("a", texts, ExtendOptions(expect="0123", wait=1.0)),
        engine.chat(Ref("a"), texts, Generation(max_tokens=4), options=ChatOptions(save=False), watcher=watcher),
    ]

def steps(engine: Engine) -> Steps[int]:
    result = yield from engine.chat_steps(Ref("a"), [], Generation())
    return result.tokens + (yield from do(lambda: 1))

def bad(engine: Engine, generation: Generation, ref: Ref) -> Steps[int]:
"""
ERRORS = {
    'engine.prefill("a", [], sytem="x")': 'Unexpected keyword argument "sytem" for "prefill"',
    'engine.prefill("a", [], PrefillOptions(sytem="x"))': 'Unexpected keyword argument "sytem" for "PrefillOptions"',
    'engine.prefill("a", [], ExtendOptions())': 'Argument 3 to "prefill" of "Engine" has incompatible type',
    'engine.prefill_steps("a", [], whatcher=1)': 'Unexpected keyword argument "whatcher" for "prefill_steps"',
    'engine.extend("a", "text")': 'Argument 2 to "extend" of "Engine" has incompatible type',
    "engine.chat(ref, [], generation, ChatOptions(sav=False))": 'Unexpected keyword argument "sav" for "ChatOptions"',
    'engine.chat("a", [], generation)': 'Argument 1 to "chat" of "Engine" has incompatible type',
    "engine.chat(ref, [], generation).tokns": '"TurnResult" has no attribute "tokns"',
    'Generation(temp="hot")': 'Argument "temp" to "Generation" has incompatible type',
    'return (yield from do(lambda: "text"))': "Incompatible return value type",
}


@pytest.mark.long
def test_a_misspelt_option_and_a_wrong_type_are_errors_of_the_type_checker(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(PREAMBLE + "".join(f"    {line}\n" for line in ERRORS))
    options = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path)]
    report, problems, _ = api.run([*options, "--no-error-summary", "--hide-error-context", str(snippet)])
    assert not problems

    first = PREAMBLE.count("\n") + 1
    found = dict(re.findall(r"^.*snippet\.py:(\d+): error: (.*)$", report, re.MULTILINE))
    assert list(found) == [str(first + place) for place in range(len(ERRORS))], report
    for message, expected in zip(found.values(), ERRORS.values(), strict=True):
        assert expected in message
