"""Lines of a batch as requests, and which of them may run."""

import json
from typing import Any

import pytest

from amem_cli.batch.order import Order
from amem_cli.batch.requests import Chat, Request, TextOf, parse, read_object
from kvstore.errors import UsageError
from kvstore.naming import Ref

Line = dict[str, Any]


def chat(key: str, agent: str, message: Any = "well?", **more: Any) -> Line:
    return {"id": key, "op": "chat", "agent": agent, "message": message, "max_tokens": 4, **more}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[1]", "not an object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"op": "chat", "agent": "a", "message": "x"}', "no id"),
        (b'{"id": "1", "agent": "a", "message": "x"}', "no op"),
        (b'{"id": 1, "op": "chat", "agent": "a", "message": "x"}', "id is not"),
        (b'{"id": "1", "op": "sing", "agent": "a", "message": "x"}', "op is not"),
        (b'{"id": "1", "op": "chat", "agent": "a b", "message": "x"}', "cannot be the name"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": ""}', "empty"),
        (b'{"id": "1", "op": "chat", "agent": "a"}', "empty"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "text": "y"}', "two texts"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": [{"text": "b"}]}', "message is not"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "\\ud800"}', "not UTF-8"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "mesage": 1}', "unknown"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "system": "s"}', "chat takes no 'system'"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "temp": NaN}', "not JSON"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "max_tokens": 0}', "max_tokens is not"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "max_tokens": true}', "max_tokens is not"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "timeout": -1}', "timeout is not"),
        (b'{"id": "1", "op": "chat", "agent": "a~1", "message": "x"}', "not the head"),
        (b'{"id": "1", "op": "chat", "agent": "a", "message": "x", "save": false, "fork_from": "b"}', "fork"),
        (b'{"id": "1", "op": "prefill", "agent": "a", "text": "x", "save": false}', "prefill takes no 'save'"),
    ],
)
def test_what_is_no_request_is_told_without_its_text(line: bytes, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse(1, read_object(line))
    assert '"x"' not in f"{caught.value.message} {caught.value.hint}".replace('{"id"', "")


def test_a_line_is_read_whole() -> None:
    values = chat("1", "a", ["He says: ", {"text_of": "0"}, "!"], after="z", stop="END", temp=1, seed=7, phase="p")
    request = parse(3, read_object(json.dumps(values).encode()))
    text = ("He says: ", TextOf("0"), "!")
    asked = Chat(id="1", agent="a", message=text, phase="p", max_tokens=4, temp=1.0, seed=7, stop="END", after="z")
    assert request == Request(3, "chat", asked, Ref("a"), text=text, after=("z",))
    assert (request.id, request.phase) == ("1", "p")
    assert request.needs == ("z", "0")
    assert request.resolved_text({"0": "yes"}) == "He says: yes!"
    with pytest.raises(UsageError, match="'0' gives no text"):
        request.resolved_text({})


def order_of(*requests: Line) -> Order:
    order = Order()
    for number, request in enumerate(requests, start=1):
        order.add(parse(number, request))
    return order


def ready(order: Order) -> list[str]:
    found = [request.id for request in order.ready]
    order.ready.clear()
    return found


def dropped(order: Order) -> dict[str, str | None]:
    """Which requests never run, and the failure that they wait for; None: the error is their own."""
    found = {each.request.id: each.failed for each in order.dropped}
    order.dropped.clear()
    return found


def test_an_agents_requests_run_in_their_order_whatever_becomes_of_them() -> None:
    order = order_of(chat("1", "a"), chat("2", "A"), chat("3", "b"), chat("4", "a"))
    assert ready(order) == ["1", "3"]
    order.settle("1", done=False)
    assert ready(order) == ["2"]
    order.settle("2", done=True)
    assert ready(order) == ["4"]


def test_a_request_waits_for_later_lines_and_for_the_source_of_its_fork() -> None:
    order = order_of(chat("1", "a", after=["3"]), chat("2", "b", [{"text_of": "1"}]), chat("3", "c"))
    order.add(parse(4, chat("4", "d", fork_from="c@s")))
    assert ready(order) == ["3"]
    order.settle("3", done=True)
    assert ready(order) == ["1", "4"]
    order.settle("1", done=True)
    assert ready(order) == ["2"]


def test_what_depends_on_a_failure_is_skipped_however_far() -> None:
    far = [chat(str(n), f"a{n}", after=[str(n - 1)] if n else []) for n in range(3000)]
    order = order_of(*far)
    order.settle("0", done=False)
    assert dropped(order) == {str(n): str(n - 1) for n in range(1, 3000)}
    order.add(parse(1, chat("late", "x", after=["2999"])))
    assert dropped(order) == {"late": "2999"}


@pytest.mark.parametrize(
    "requests",
    [
        [chat("1", "a", after=["1"])],
        [chat("1", "a", after=["2"]), chat("2", "b", after=["1"])],
        [chat("1", "a", after=["2"]), chat("2", "a")],  # the second waits for the first, its agent's earlier one
        [chat("1", "a", [{"text_of": "3"}]), chat("2", "b", after=["1"]), chat("3", "c", after=["2"])],
    ],
)
def test_a_circle_fails_whole(requests: list[Line]) -> None:
    order = order_of(*requests, chat("other", "z", after=["1"]))
    assert dropped(order) == {**{request["id"]: None for request in requests}, "other": "1"}
    assert not ready(order)


def test_at_the_end_nothing_waits_for_ids_that_never_came() -> None:
    order = order_of(chat("1", "a", after=["nobody"]), chat("2", "b", after=["1"]), chat("3", "a"))
    order.close()
    assert dropped(order) == {"1": None, "2": "1"}
    assert ready(order) == ["3"]
