"""Whatever a line of a batch holds, it is a request or a usage error whose message quotes none of its text."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amem_cli.batch.requests import Request, id_of, parse, read_object
from kvstore.errors import UsageError

OPS = ["prefill", "chat", "extend", "snapshot"]
KEYS = [
    *("id", "op", "agent", "message", "text", "system", "role", "phase", "raw", "model", "domain", "replace", "codec"),
    *("max_tokens", "temp", "top_p", "seed", "stop", "save", "fork_from", "name", "note", "after", "priority"),
    *("timeout", "line", "operation"),
]
SECRET = "Xsecretž"
NUMBERS = [0, -1, 1 << 63, -(1 << 70), 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", SECRET, "a", "user", "\ud800", "\udc00x", "a@s", "sha256:", "q4-channel", "x" * 300]

leaves = st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.integers(), st.floats(), st.text(max_size=5))
leaves = leaves | st.sampled_from(TEXTS)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYS, *TEXTS, "text_of"]), inner, max_size=3)
        | st.builds(lambda value: {"text_of": value}, inner)
    ),
    max_leaves=8,
)
objects = st.builds(
    lambda base, more: base | more,
    st.fixed_dictionaries(
        {}, optional={"id": st.just("1"), "op": st.sampled_from(OPS), "agent": st.just("a"), "text": st.just("hello")}
    ),
    st.dictionaries(st.sampled_from(KEYS) | st.sampled_from(TEXTS), values, max_size=3),
)


def read(line: bytes) -> Request | None:
    """The request of a line, or None: then it was a usage error, without the line's text."""
    try:
        found = read_object(line)
        id_of(found)
        return parse(1, found)
    except UsageError as error:
        assert error.message
        return None


@settings(deadline=None, max_examples=400)
@given(objects)
def test_any_object_is_a_request_or_a_usage_error(line: dict[str, Any]) -> None:
    request = read(json.dumps(line).encode())
    if request is not None:
        assert (request.id, request.op, str(request.agent)) == (line["id"], line["op"], line["agent"])


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_read_or_refused(line: bytes) -> None:
    read(line)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([key for key in KEYS if key not in ("op", "id", "agent")]), values, st.sampled_from(OPS))
def test_messages_quote_no_text(key: str, value: object, op: str) -> None:
    line = {"id": "1", "op": op, "agent": "a", "text": SECRET, key: value}
    try:
        parse(1, line)
    except UsageError as error:
        told = f"{error.message} {error.hint}"
        assert SECRET not in told or key in ("phase", "domain", "name", "fork_from")  # names may be quoted


@pytest.mark.parametrize("key", ["text", "after", "stop", "note", "timeout", "unknown"])
@pytest.mark.parametrize("depth", [10, 900, 100_000])
def test_deep_nesting_is_refused(key: str, depth: int) -> None:
    line = b'{"id": "1", "op": "chat", "agent": "a", "%s": %s1%s}' % (key.encode(), b"[" * depth, b"]" * depth)
    assert read(line) is None


def test_the_last_of_duplicate_keys_counts() -> None:
    request = read(b'{"id": "1", "id": "2", "op": "chat", "agent": "a", "temp": "x", "temp": 1, "text": "hi"}')
    assert request is not None and request.id == "2"
    assert read(b'{"id": "1", "op": "chat", "agent": "a", "text": "hi", "temp": 1, "temp": "x"}') is None


@pytest.mark.parametrize("text", ["1" * 400, "-" + "1" * 400, "1e999", "NaN", "Infinity", "true", '"1"', "[1]", "{}"])
@pytest.mark.parametrize("key", ["max_tokens", "temp", "top_p", "seed", "priority"])
def test_numbers_out_of_bounds_are_refused_by_key(key: str, text: str) -> None:
    line = f'{{"id": "1", "op": "chat", "agent": "a", "text": "hi", "{key}": {text}}}'
    with pytest.raises(UsageError, match=f"{key} is not|not JSON"):
        parse(1, read_object(line.encode()))
