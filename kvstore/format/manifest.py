"""Manifests and pages: the immutable JSON documents from which an agent is resumed at one position.

A manifest holds everything but the tensors. Its token ids and the rows of its full-attention blocks stand in pages
of 4,096 tokens, each an immutable file of its own: all but the last are shared by every later manifest, so a turn
writes one open page however long the context is. Rows of window blocks stand in the manifest itself, since they
change as the window moves on and a closed page must not.

Bytes are canonical JSON (sorted keys, no spaces, UTF-8), so that equal content has an equal digest.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from kvstore.errors import DamageError, NoStoreError
from kvstore.format.codecs import Codec
from kvstore.format.layers import LayerGroup
from kvstore.format.parts import Part

FORMAT = 1
REFINED = "refined-codes"  # the feature: blocks at position 0 hold a second layer of codes
PAGE_TOKENS = 4096

Role = Literal["system", "user", "assistant", "raw"]


@dataclass(frozen=True)
class BlockRow:
    """One block as a page or a manifest lists it."""

    group: str  # the layer group's id
    position: int  # of its first token, a multiple of 256
    prefix_key: str
    sha256: str
    xxh3: str  # xxh3-64 of the file, hex
    bytes: int


@dataclass(frozen=True)
class FileRow:
    """A tail or a page: its digest, its checksum, its size, and how many tokens it holds."""

    sha256: str
    xxh3: str
    bytes: int
    tokens: int


@dataclass(frozen=True)
class Page:
    """Token ids of up to 4,096 tokens from `start`, and the rows of the full-attention blocks among them."""

    start: int
    tokens: tuple[int, ...]
    blocks: tuple[BlockRow, ...]
    salt: str  # the domain's: no digest can be tested against a guessed text once it is gone
    format: int = FORMAT


@dataclass(frozen=True)
class Turn:
    """A run of tokens with one role; no text. `label` names the phase it belongs to."""

    role: Role
    start: int
    end: int
    label: str | None = None


@dataclass(frozen=True)
class ModelIdentity:
    """What computed the KV: a digest for each part that changes it, and one over them all."""

    name: str
    fingerprint: str
    parts: dict[str, str]  # weights, config, tokenizer, template, adapter → digest


@dataclass(frozen=True)
class Sampling:
    """How the last answer was sampled: a function of (seed, position)."""

    seed: int
    temp: float
    top_p: float


@dataclass(frozen=True)
class Manifest:
    """Everything needed to resume an agent at `cached` tokens; tokens beyond that are known and still pending."""

    agent: str  # ids, not names
    domain: str
    salt: str
    previous: str | None  # the agent's state before this one
    resumes: str | None  # the state that a restore or a fork took over
    op: str  # prefill, chat, extend, restore, fork
    model: ModelIdentity
    codec: Codec
    groups: tuple[LayerGroup, ...]
    tokens: int
    cached: int
    pages: tuple[FileRow, ...]
    window_blocks: tuple[BlockRow, ...]
    tail: FileRow | None
    feeds: tuple[tuple[int, int], ...]  # (tokens in one pass, how many such passes in a row)
    turns: tuple[Turn, ...]
    owed: tuple[int, ...]  # closing tokens that the last turn still owes: they are fed before what comes next
    stop: str | None  # stop, length or interrupted
    sampling: Sampling | None
    complete: bool  # False: a prefill that was cut short, or a state on its way; what follows it takes over `previous`
    created: str
    recomputed: bool = False
    format: int = FORMAT
    features: tuple[str, ...] = ()  # what a reader must know; an unknown one is refused

    @property
    def pending(self) -> int:
        return self.tokens - self.cached

    @property
    def evicted(self) -> bool:
        """Its tokens are all there, and none of its blocks: the passes that made them are to be made again."""
        return self.cached == 0 and bool(self.feeds)


_DECODER = json.JSONDecoder()


def features_of(codec: Codec) -> tuple[str, ...]:
    """What a reader of states with this codec must know."""
    return (REFINED,) if codec.refined else ()


def encode(document: Manifest | Page) -> bytes:
    """The canonical bytes of a manifest or a page."""
    values = asdict(document)
    if isinstance(document, Manifest) and not document.codec.refined:
        del values["codec"]["refined"]  # codecs that refine nothing are written as they were before there were others
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _load(data: bytes, kind: type[Manifest] | type[Page], what: str) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except ValueError as error:
        raise DamageError(f"{what} is not JSON", "run `amem verify` to see which agents it hurts") from error
    if not isinstance(values, dict) or "format" not in values:
        raise DamageError(f"{what} is not a {kind.__name__.lower()}", "run `amem verify` to see which agents it hurts")
    if values["format"] != FORMAT or values.get("features", []) not in ([], [REFINED]):
        raise NoStoreError(f"{what} was written by another version of amem", "use the version that wrote it")
    if set(values) != {f.name for f in fields(kind)}:
        raise DamageError(f"{what} lacks fields or has unknown ones", "run `amem verify` to see which agents it hurts")
    return values


def _layer_group(values: dict[str, Any]) -> LayerGroup:
    states = tuple(Part(**{**part, "shape": tuple(part["shape"])}) for part in values["states"])
    return LayerGroup(**{**values, "layers": tuple(values["layers"]), "states": states})


def decode_page(data: bytes, what: str = "a page") -> Page:
    """Read a page. Raises DamageError, and NoStoreError for another version's."""
    values = _load(data, Page, what)
    values["tokens"] = tuple(values["tokens"])
    values["blocks"] = tuple(BlockRow(**row) for row in values["blocks"])
    return Page(**values)


def decode_page_blocks(data: bytes, what: str = "a page") -> tuple[BlockRow, ...]:
    """The rows of a page, without parsing its tokens: in canonical bytes they come first. Raises as `decode_page`."""
    lead = b'{"blocks":'
    if not data.startswith(lead):
        return decode_page(data, what).blocks
    try:
        rows, _ = _DECODER.raw_decode(data[: data.find(b"]") + 1].decode(), len(lead))
        return tuple(BlockRow(**row) for row in rows)
    except (TypeError, ValueError) as error:
        raise DamageError(f"{what} is malformed", "run `amem verify` to see which agents it hurts") from error


def decode_manifest(data: bytes, what: str = "a manifest") -> Manifest:
    """Read a manifest. Raises DamageError, and NoStoreError for another version's."""
    values = _load(data, Manifest, what)
    try:
        values["model"] = ModelIdentity(**values["model"])
        values["codec"] = Codec(**values["codec"])
        values["groups"] = tuple(map(_layer_group, values["groups"]))
        values["pages"] = tuple(FileRow(**row) for row in values["pages"])
        values["window_blocks"] = tuple(BlockRow(**row) for row in values["window_blocks"])
        values["tail"] = FileRow(**values["tail"]) if values["tail"] else None
        values["feeds"] = tuple((length, count) for length, count in values["feeds"])
        values["turns"] = tuple(Turn(**turn) for turn in values["turns"])
        values["sampling"] = Sampling(**values["sampling"]) if values["sampling"] else None
        values["owed"], values["features"] = tuple(values["owed"]), tuple(values["features"])
        return Manifest(**values)
    except (TypeError, ValueError, KeyError) as error:
        raise DamageError(f"{what} is malformed", "run `amem verify` to see which agents it hurts") from error
