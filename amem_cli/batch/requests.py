"""A line of `amem batch` as a typed request. A key that an operation does not take is an error, never ignored.

Messages name keys and positions only; they never quote the line.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta, Struct

from amem_cli.shell.inputs import check_text
from kvstore.errors import UsageError
from kvstore.format.codecs import CODECS
from kvstore.naming import Ref, check_name, parse_ref

_ID_LENGTH = 200
_INT64 = (1 << 63) - 1

Id = Annotated[str, Meta(min_length=1, max_length=_ID_LENGTH)]
Count = Annotated[int, Meta(ge=1, le=_INT64)]


class TextOf(Struct, frozen=True, forbid_unknown_fields=True, rename={"id": "text_of"}):
    """A placeholder for the answer of another request."""

    id: Id


Part = str | TextOf
Parts = str | TextOf | tuple[Part, ...]


class Operation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="op"):
    """The keys that every operation takes."""

    id: Id
    agent: str
    model: str | None = None
    fork_from: str | None = None
    after: Id | tuple[Id, ...] = ()
    priority: Annotated[int, Meta(ge=-_INT64 - 1, le=_INT64)] = 0
    timeout: Annotated[float, Meta(ge=0)] | None = None


class Snapshot(Operation, frozen=True, kw_only=True, tag="snapshot"):
    """Name a state."""

    name: str | None = None
    note: str | None = None


class TextOperation(Operation, frozen=True, kw_only=True):
    """The keys of the operations that take text; `message` is another word for `text`."""

    message: Parts = ()
    text: Parts = ()
    phase: str | None = None


class Prefill(TextOperation, frozen=True, kw_only=True, tag="prefill"):
    """Build an agent's cache."""

    system: str | None = None
    role: Literal["user", "assistant"] = "user"
    raw: bool = False
    domain: str | None = None
    replace: bool = False
    codec: str | None = None


class Extend(TextOperation, frozen=True, kw_only=True, tag="extend"):
    """Add context."""

    role: Literal["user", "assistant"] = "user"
    raw: bool = False


class Chat(TextOperation, frozen=True, kw_only=True, tag="chat"):
    """Generate an answer."""

    max_tokens: Count = 256
    temp: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=_INT64)] | None = None
    stop: str | tuple[str, ...] = ()
    save: bool = True


AnyOperation = Prefill | Chat | Extend | Snapshot
_OPERATIONS: dict[str, type[AnyOperation]] = {
    "prefill": Prefill,
    "chat": Chat,
    "extend": Extend,
    "snapshot": Snapshot,
}
_TEXT = 'a string, or a list of strings and {"text_of": ID}'
# What each key may hold, as error messages say it. The structs above enforce it.
_WANTED = {
    "id": f"a string of 1 to {_ID_LENGTH} characters",
    "op": f"one of {', '.join(_OPERATIONS)}",
    "agent": "a state of an agent",
    "message": _TEXT,
    "text": _TEXT,
    "system": "a string",
    "role": "user or assistant",
    "phase": "a string",
    "raw": "true or false",
    "model": "a string",
    "domain": "a string",
    "replace": "true or false",
    "codec": f"one of {', '.join(CODECS)}",
    "max_tokens": "an integer from 1",
    "temp": "a number from 0",
    "top_p": "a number from 0 to 1",
    "seed": "an integer from 0",
    "stop": "a string, or a list of strings",
    "save": "true or false",
    "fork_from": "a state of an agent",
    "name": "a string",
    "note": "a string",
    "after": "an id, or a list of ids",
    "priority": "an integer",
    "timeout": "a number of seconds from 0",
}
_PATH = re.compile(r" - at `\$\.(\w+)")  # at the end of an error of msgspec


@dataclass(frozen=True)
class Request:
    """One line: its operation, and the names, references and texts in it, parsed and checked."""

    line: int
    op: str
    operation: AnyOperation
    agent: Ref
    fork_from: Ref | None = None
    text: tuple[Part, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return self.operation.id

    @property
    def phase(self) -> str | None:
        return self.operation.phase if isinstance(self.operation, TextOperation) else None

    @property
    def needs(self) -> tuple[str, ...]:
        """The ids that must be done before this request, each once."""
        texts = (part.id for part in self.text if isinstance(part, TextOf))
        return tuple(dict.fromkeys((*self.after, *texts)))

    def resolved_text(self, answers: Mapping[str, str]) -> str:
        """The text with the answers of other requests filled in. Raises UsageError if one of them has no answer."""
        for part in self.text:
            if isinstance(part, TextOf) and part.id not in answers:
                raise UsageError(f"{part.id!r} gives no text", "text_of takes the id of a chat")
        return "".join(answers[part.id] if isinstance(part, TextOf) else part for part in self.text)


def read_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line, not yet checked. Raises UsageError."""
    try:
        values = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise UsageError(f"the line is not UTF-8: invalid byte at offset {error.start}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"the line is not JSON: error at column {error.colno}", "write one object per line") from error
    except (ValueError, RecursionError) as error:
        raise UsageError("the line is not JSON that can be read") from error
    if not isinstance(values, dict):
        raise UsageError("the line is not an object", 'a request is like {"id": "1", "op": "chat", "agent": "a", ...}')
    return values


def id_of(values: Mapping[str, Any]) -> str | None:
    """The id of a line, if it has a valid one."""
    try:
        key: str = msgspec.convert(values.get("id"), Id)
    except msgspec.ValidationError:
        return None
    return check_text(key, "id")


def parse(number: int, values: Mapping[str, Any]) -> Request:
    """The request of line `number`; a key with the value null counts as absent. Raises UsageError."""
    given = {key: value for key, value in values.items() if value is not None}
    op = _check_keys(given)
    operation = _decode(given, op)
    _check_names(operation)
    request = Request(
        line=number,
        op=op,
        operation=operation,
        agent=parse_ref(operation.agent),
        fork_from=parse_ref(operation.fork_from) if operation.fork_from is not None else None,
        text=_text(operation),
        after=(operation.after,) if isinstance(operation.after, str) else operation.after,
    )
    _check(request)
    return request


def _check_keys(values: Mapping[str, Any]) -> str:
    """The operation of a line that has the keys it needs, and only keys that its operation takes. Raises UsageError."""
    for key in ("id", "op", "agent"):
        if key not in values:
            raise UsageError(f"the line has no {key}", f"a request has id, op and agent; op is {_WANTED['op']}")
    op = values["op"]
    if not isinstance(op, str) or op not in _OPERATIONS:
        raise UsageError(f"op is not {_WANTED['op']}")
    for key in values:
        if key not in _WANTED:
            raise UsageError("the line has an unknown key", f"the keys are {', '.join(_WANTED)}")
        if key != "op" and key not in _OPERATIONS[op].__struct_fields__:
            takers = ", ".join(name for name, kind in _OPERATIONS.items() if key in kind.__struct_fields__)
            raise UsageError(f"{op} takes no {key!r}", f"{key} goes with {takers}")
    return op


def _decode(values: Mapping[str, Any], op: str) -> AnyOperation:
    """The values as the operation's struct. Raises UsageError for wrong types, bounds and lone surrogates."""
    try:
        operation = msgspec.convert(values, _OPERATIONS[op])
        json.dumps(values, ensure_ascii=False).encode()
    except msgspec.ValidationError as error:
        found = _PATH.search(str(error))
        key = found[1] if found else "op"
        raise UsageError(f"{key} is not {_WANTED[key]}") from error
    except UnicodeEncodeError as error:
        raise UsageError("a text of the line is not UTF-8") from error
    return operation


def _check_names(operation: AnyOperation) -> None:
    """Raise UsageError for a name that is not valid, or a codec that does not exist."""
    if isinstance(operation, TextOperation) and operation.phase is not None:
        check_name("phase", operation.phase)
    if isinstance(operation, Snapshot) and operation.name is not None:
        check_name("snapshot", operation.name)
    if isinstance(operation, Prefill):
        if operation.domain is not None:
            check_name("domain", operation.domain)
        if operation.codec is not None and operation.codec not in CODECS:
            raise UsageError(f"codec is not {_WANTED['codec']}")


def _text(operation: AnyOperation) -> tuple[Part, ...]:
    """The parts of the text, without empty ones. Raises UsageError if both keys for it are given."""
    if not isinstance(operation, TextOperation):
        return ()
    if operation.message != () and operation.text != ():
        raise UsageError("two texts given", "give message or text, not both")
    given = operation.text if operation.message == () else operation.message
    parts = given if isinstance(given, tuple) else (given,)
    return tuple(part for part in parts if part != "")


def _check(request: Request) -> None:
    """Raise UsageError for a request whose parts do not go together."""
    operation = request.operation
    if isinstance(operation, Snapshot):
        return
    if not (request.text or (isinstance(operation, Prefill) and operation.system)):
        raise UsageError("the prompt is empty", "give message, text or system")
    save = not isinstance(operation, Chat) or operation.save
    if save and not request.agent.is_head:
        raise UsageError(f"{request.agent} is not the head of {request.agent.agent}", "fork_from continues a state")
    if request.fork_from and not save:
        raise UsageError("a fork is always saved, but save is false", "name the state itself as the agent")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
