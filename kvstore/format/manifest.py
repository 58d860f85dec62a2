"""Manifests and pages: the immutable JSON documents from which an agent is resumed at one position.

A manifest holds everything but the tensors. Its token ids and the rows of its full-attention blocks are in pages of
4,096 tokens, each an immutable file of its own: all but the last are shared by every later manifest, so a turn writes
one open page however long the context is. Rows of window blocks are in the manifest itself, since they change as the
window moves on and a closed page must not.

Bytes are canonical JSON (sorted keys, no spaces, UTF-8), so that equal content has an equal digest.
"""

from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from kvstore.disk.canonical_json import dump
from kvstore.errors import DamageError, NoStoreError
from kvstore.format.codecs import Codec
from kvstore.format.document import Count, Document, Id, Sha256, Xxh3, as_dict, parse, place_of
from kvstore.format.layers import LayerGroup

FORMAT: Literal[1] = 1
REFINED = "refined-codes"  # the feature: blocks at position 0 hold a second layer of codes
FEATURES = frozenset({REFINED})  # what this version can read
PAGE_TOKENS = 4096
EVICT = "evict"  # the op of a state that holds tokens and feeds only
TAKES_OVER = ("fork", "restore", "import")  # ops of a state that continues the one that it `resumes`

Role = Literal["system", "user", "assistant", "raw"]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Passes = Annotated[int, Meta(ge=1, lt=1 << 62)]


class BlockRow(Document, frozen=True):
    """One block as a page or a manifest lists it."""

    group: str  # the layer group's id
    position: Count  # of its first token, a multiple of 256
    prefix_key: Sha256
    sha256: Sha256
    xxh3: Xxh3  # of the file
    bytes: Count


class FileRow(Document, frozen=True):
    """A tail or a page: its digest, its checksum, its size, and how many tokens it holds."""

    sha256: Sha256
    xxh3: Xxh3
    bytes: Count
    tokens: Count


class Page(Document, frozen=True):
    """Token ids of up to 4,096 tokens from `start`, and the rows of the full-attention blocks among them."""

    start: Count
    tokens: tuple[TokenId, ...]
    blocks: tuple[BlockRow, ...]
    salt: Sha256  # the domain's: no digest can be tested against a guessed text once it is gone
    format: Literal[1] = FORMAT


class Turn(Document, frozen=True):
    """A run of tokens with one role; no text. `label` names the phase it belongs to."""

    role: Role
    start: Count
    end: Count
    label: str | None = None


class ModelIdentity(Document, frozen=True):
    """What computed the KV: a digest for each part that changes it, and one over them all."""

    name: str
    fingerprint: str
    parts: dict[str, str]  # weights, config, tokenizer, template, adapter → digest


class Sampling(Document, frozen=True):
    """How the last answer was sampled: a function of (seed, position)."""

    seed: Count
    temp: Annotated[float, Meta(ge=0)]
    top_p: Annotated[float, Meta(ge=0, le=1)]


class Manifest(Document, frozen=True):
    """Everything needed to resume an agent at `cached` tokens; tokens beyond that are known and still pending.

    Fields that name other files or states are listed in `kvstore.format.references`.
    """

    agent: Id  # ids, not names
    domain: Id
    salt: Sha256
    previous: Sha256 | None  # the agent's state before this one
    resumes: Sha256 | None  # the state that a restore or a fork took over
    op: str  # prefill, chat, extend, restore, fork
    model: ModelIdentity
    codec: Codec
    groups: tuple[LayerGroup, ...]
    tokens: Count
    cached: Count
    pages: tuple[FileRow, ...]
    window_blocks: tuple[BlockRow, ...]
    tail: FileRow | None
    feeds: tuple[tuple[Passes, Passes], ...]  # (tokens in one pass, how many such passes in a row)
    turns: tuple[Turn, ...]
    owed: tuple[TokenId, ...]  # closing tokens that the last turn still owes: they are fed before what comes next
    stop: str | None  # stop, length or interrupted
    sampling: Sampling | None
    complete: bool  # False: a prefill that was cut short; the state after it takes over `previous`
    created: str
    recomputed: bool = False
    format: Literal[1] = FORMAT
    features: tuple[str, ...] = ()  # what a reader must know; an unknown one is refused

    @property
    def pending(self) -> int:
        return self.tokens - self.cached

    @property
    def evicted(self) -> bool:
        """All tokens are kept and no block is: the passes of `feeds` must be made again."""
        return self.cached == 0 and bool(self.feeds)


class _Version(Struct):
    """What a reader looks at first. Other fields are skipped."""

    format: int
    features: Any = []


class _PageBlocks(Struct):
    """A page without its tokens."""

    blocks: tuple[BlockRow, ...]


D = TypeVar("D", bound=Struct)


def features_of(codec: Codec) -> tuple[str, ...]:
    """What a reader of states with this codec must know."""
    return (REFINED,) if codec.refined else ()


def encode(document: Manifest | Page) -> bytes:
    """The canonical bytes of a manifest or a page."""
    values = as_dict(document)
    if isinstance(document, Manifest) and not document.codec.refined:
        del values["codec"]["refined"]  # codecs that refine nothing are written as they were before there were others
    return dump(values)


def _are_known(features: Any) -> bool:
    """Whether this version can read states with these features, each named once."""
    named = isinstance(features, list) and all(isinstance(feature, str) for feature in features)
    return named and FEATURES.issuperset(features) and len(features) == len(set(features))


def _decode(data: bytes, kind: type[D], what: str) -> D:
    try:
        version = parse(data, _Version)
        if version.format != FORMAT or not _are_known(version.features):
            raise NoStoreError(f"{what} was written by another version of amem", "use the version that wrote it")
        return parse(data, kind)
    except ValueError as error:
        raise DamageError(f"{what} is malformed{place_of(error)}", "`amem verify` lists the affected agents") from error


def decode_page(data: bytes, what: str = "a page") -> Page:
    """Read a page. Raises DamageError, and NoStoreError for another version's."""
    return _decode(data, Page, what)


def decode_page_blocks(data: bytes, what: str = "a page") -> tuple[BlockRow, ...]:
    """The rows of a page, without making its tokens. Raises as `decode_page`."""
    return _decode(data, _PageBlocks, what).blocks


def decode_manifest(data: bytes, what: str = "a manifest") -> Manifest:
    """Read a manifest. Raises DamageError, and NoStoreError for another version's."""
    return _decode(data, Manifest, what)
