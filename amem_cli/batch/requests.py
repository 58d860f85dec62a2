"""A line of `amem batch` as a request. A key that an operation does not take is an error, never passed over.

What is wrong is told by the names of keys and by positions alone: messages hold nothing of what the line says.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from amem_cli.shell.inputs import check_text
from kvstore.errors import UsageError
from kvstore.format.codecs import CODECS
from kvstore.naming import Ref, check_name, parse_ref

Op = Literal["prefill", "chat", "extend", "snapshot"]
OPS: tuple[Op, ...] = get_args(Op)
_SAID = ("prefill", "chat", "extend")
_ID_LENGTH = 200


@dataclass(frozen=True)
class TextOf:
    """Stands for the answer that another request got."""

    id: str


@dataclass(frozen=True)
class Request:
    """One line: what is to be done for which agent, and what must be done before it."""

    line: int
    id: str
    op: Op
    agent: Ref
    text: tuple[str | TextOf, ...] = ()
    system: str | None = None
    role: str = "user"
    phase: str | None = None
    raw: bool = False
    model: str | None = None
    domain: str | None = None
    replace: bool = False
    codec: str | None = None
    max_tokens: int = 256
    temp: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    save: bool = True
    fork_from: Ref | None = None
    name: str | None = None
    note: str | None = None
    after: tuple[str, ...] = ()
    priority: int = 0
    timeout: float | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """The ids that must be done before it, each once."""
        texts = (part.id for part in self.text if isinstance(part, TextOf))
        return tuple(dict.fromkeys((*self.after, *texts)))

    def said(self, answers: Mapping[str, str]) -> str:
        """The text, with others' answers in their places. Raises UsageError where a request gave none."""
        for part in self.text:
            if isinstance(part, TextOf) and part.id not in answers:
                raise UsageError(f"{part.id!r} gives no text", "text_of takes the id of a chat")
        return "".join(answers[part.id] if isinstance(part, TextOf) else part for part in self.text)


def read_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises UsageError."""
    try:
        values = json.loads(line.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise UsageError(f"the line is not UTF-8: byte {error.start} does not belong there") from error
    except json.JSONDecodeError as error:
        raise UsageError(
            f"the line is not JSON from column {error.colno} on", "write one object on one line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError("the line is not JSON that can be read") from error
    if not isinstance(values, dict):
        raise UsageError("the line is not an object", 'a request is like {"id": "1", "op": "chat", "agent": "a", ...}')
    return values


def id_of(values: Mapping[str, Any]) -> str | None:
    """The id of a line, if it has one that can be named."""
    given = values.get("id")
    try:
        return None if given is None else _id(given)
    except ValueError:
        return None


def parse(number: int, values: Mapping[str, Any]) -> Request:
    """The request of line `number`. Raises UsageError."""
    for key in ("id", "op", "agent"):
        if key not in values:
            raise UsageError(f"the line has no {key}", f"a request has id, op and agent; op is {', '.join(OPS)}")
    read = {key: _read(key, value) for key, value in values.items() if value is not None}
    op = read["op"]
    for key in read:
        if op not in _KEYS[key].ops:
            raise UsageError(f"{op} takes no {key!r}", f"{key} goes with {', '.join(_KEYS[key].ops)}")
    if "message" in read and "text" in read:
        raise UsageError("there are two texts", "give message or text")
    read["text"] = read.pop("message", None) or read.get("text", ())
    request = Request(line=number, **read)
    if not (request.text or request.system or op == "snapshot"):
        raise UsageError("the prompt is empty", "give message, text or system")
    if not (request.agent.is_head or op == "snapshot" or not request.save):
        raise UsageError(f"{request.agent} is not the head of {request.agent.agent}", "fork_from continues a state")
    if request.fork_from and not request.save:
        raise UsageError("a fork is saved, and save is false", "name the state itself as the agent")
    return request


def _read(key: str, value: Any) -> Any:
    if key not in _KEYS:
        raise UsageError("the line has a key that is unknown", f"the keys are {', '.join(_KEYS)}")
    try:
        return _KEYS[key].read(value)
    except ValueError as error:
        raise UsageError(f"{key} is not {_KEYS[key].wanted}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return check_text(value, "a text of the line")


def _id(value: Any) -> str:
    if not 0 < len(text := _string(value)) <= _ID_LENGTH:
        raise ValueError
    return text


def _ids(value: Any) -> tuple[str, ...]:
    return tuple(_id(each) for each in (value if isinstance(value, list) else [value]))


def _name(kind: str) -> Callable[[Any], str]:
    return lambda value: check_name(kind, _string(value))


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError
        return str(value)

    return read


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _int(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 63:
            raise ValueError
        return value

    return read


def _number(most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
            raise ValueError
        return float(value)

    return read


def _parts(value: Any) -> tuple[str | TextOf, ...]:
    parts = value if isinstance(value, list) else [value]
    return tuple(part for each in parts if (part := _part(each)) != "")


def _part(value: Any) -> str | TextOf:
    if not isinstance(value, dict):
        return _string(value)
    if set(value) != {"text_of"}:
        raise ValueError
    return TextOf(_id(value["text_of"]))


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(map(_string, value if isinstance(value, list) else [value]))


@dataclass(frozen=True)
class _Key:
    """What a key may hold, and with which operations it goes."""

    read: Callable[[Any], Any]
    wanted: str
    ops: tuple[str, ...] = OPS


_STATE = _Key(lambda value: parse_ref(_string(value)), "a state of an agent")
_TEXT = _Key(_parts, 'a string, or a list of strings and {"text_of": ID}', _SAID)
_KEYS = {
    "id": _Key(_id, f"a string of 1 to {_ID_LENGTH} characters"),
    "op": _Key(_one_of(*OPS), f"one of {', '.join(OPS)}"),
    "agent": _STATE,
    "message": _TEXT,
    "text": _TEXT,
    "system": _Key(_string, "a string", ("prefill",)),
    "role": _Key(_one_of("user", "assistant"), "user or assistant", ("prefill", "extend")),
    "phase": _Key(_name("phase"), "a string", _SAID),
    "raw": _Key(_bool, "true or false", ("prefill", "extend")),
    "model": _Key(_string, "a string"),
    "domain": _Key(_name("domain"), "a string", ("prefill",)),
    "replace": _Key(_bool, "true or false", ("prefill",)),
    "codec": _Key(_one_of(*CODECS), f"one of {', '.join(CODECS)}", ("prefill",)),
    "max_tokens": _Key(_int(1), "a whole number from 1 on", ("chat",)),
    "temp": _Key(_number(1e9), "a number from 0 on", ("chat",)),
    "top_p": _Key(_number(1), "a number from 0 to 1", ("chat",)),
    "seed": _Key(_int(0), "a whole number from 0 on", ("chat",)),
    "stop": _Key(_strings, "a string, or a list of strings", ("chat",)),
    "save": _Key(_bool, "true or false", ("chat",)),
    "fork_from": _STATE,
    "name": _Key(_name("snapshot"), "a string", ("snapshot",)),
    "note": _Key(_string, "a string", ("snapshot",)),
    "after": _Key(_ids, "a list of ids"),
    "priority": _Key(_int(-(1 << 63)), "a whole number"),
    "timeout": _Key(_number(math.inf), "a number of seconds"),
}
