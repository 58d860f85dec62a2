"""The base of every JSON document of a store: immutable, strictly typed, with canonical bytes.

msgspec decodes a document in one step and checks each field's type and bounds on the way. Unknown and missing fields
are refused. An object in memory is not checked: the code that makes it is.
"""

import re
from typing import Annotated, Any, TypeVar

from msgspec import DecodeError, Meta, Struct, ValidationError, convert, to_builtins
from msgspec.json import decode
from msgspec.structs import replace

from kvstore.disk.canonical_json import dump, loads

__all__ = [
    "Count",
    "Document",
    "HexId",
    "Id",
    "Sha256",
    "Xxh3",
    "Xxh128",
    "as_dict",
    "encode",
    "from_values",
    "parse",
    "place_of",
    "replace",
]

Id = Annotated[str, Meta(pattern="^[0-9a-z]{1,64}$")]
"""A random id. It becomes a file name, so that it holds no separator."""
HexId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
"""A random id as `kvstore.naming.new_id` makes it."""
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Xxh128 = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Xxh3 = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Document(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a store's JSON. Its fields are the keys."""


D = TypeVar("D")
_PLACE = re.compile(r" at `(\$[^`]*)`")


def as_dict(document: Struct) -> dict[str, Any]:
    """The document as JSON values: dicts, lists, strings, numbers."""
    values: dict[str, Any] = to_builtins(document)
    return values


def encode(document: Struct) -> bytes:
    """The canonical bytes of a document."""
    return dump(as_dict(document))


def parse(data: bytes, kind: type[D]) -> D:
    """Decode a document. Raises ValueError for anything but a document of this kind."""
    try:
        return decode(data, type=kind)
    except ValidationError:
        raise
    except (DecodeError, RecursionError):
        # version 0.1.0 could write a sampling temperature as `Infinity`, which is no JSON
        return convert(loads(data), type=kind)


def from_values(values: dict[str, Any], kind: type[D]) -> D:
    """The document with these JSON values. Raises ValueError as `parse` does."""
    return convert(values, type=kind)


def place_of(error: ValueError) -> str:
    """Where in a document an error of `parse` is, as ` at $.field`; never a value of the document."""
    found = _PLACE.search(str(error)) if isinstance(error, ValidationError) else None
    return f" at {found[1]}" if found else ""
