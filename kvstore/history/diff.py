"""Two states side by side: where they part, what they share, and what computed them. Nothing here writes."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.format.codecs import Codec
from kvstore.format.kinds import BLOCK
from kvstore.format.manifest import Manifest, Turn
from kvstore.graph.walk import StateFiles
from kvstore.history.resolve import State
from kvstore.reader import Reader


@dataclass(frozen=True)
class TurnAt:
    """The turn that holds a token: its place among the turns, from 0, its role and the label of its phase."""

    index: int
    role: str
    label: str | None


@dataclass(frozen=True)
class Side:
    """One of the two states."""

    state: State
    codec: Codec
    blocks: int  # that the other one does not have
    bytes: int  # of those
    turn: TurnAt | None  # that holds the first token that differs; None where no token does


@dataclass(frozen=True)
class Difference:
    """How two states differ. `parted_at` is the first token that differs or that only one has; None: same tokens."""

    a: Side
    b: Side
    common_tokens: int
    parted_at: int | None
    shared_blocks: int
    shared_bytes: int
    model_parts: dict[str, tuple[str | None, str | None]]  # the parts of the fingerprint that differ


def compare(reader: Reader, a: State, b: State) -> Difference:
    """Compare two states; those of different domains share no blocks. Raises DamageError and IsolationError."""
    common = _common_tokens(reader, a.manifest, b.manifest)
    same = common == a.manifest.tokens == b.manifest.tokens
    blocks_a, blocks_b = (_blocks(reader, state.manifest) for state in (a, b))
    shared = blocks_a.keys() & blocks_b.keys()
    parts_a, parts_b = a.manifest.model.parts, b.manifest.model.parts
    return Difference(
        a=_side(a, blocks_a, shared, common),
        b=_side(b, blocks_b, shared, common),
        common_tokens=common,
        parted_at=None if same else common,
        shared_blocks=len(shared),
        shared_bytes=sum(blocks_a[key] for key in shared),
        model_parts={
            part: (parts_a.get(part), parts_b.get(part))
            for part in sorted(parts_a.keys() | parts_b.keys())
            if parts_a.get(part) != parts_b.get(part)
        },
    )


def tokens_from(reader: Reader, manifest: Manifest, start: int) -> list[int]:
    """The token ids of a state from `start` on. Raises DamageError."""
    return [token for page in reader.pages(manifest) for token in page.tokens[max(0, start - page.start) :]]


_Blocks = dict[tuple[str, str], int]  # by domain and digest → bytes


def _blocks(reader: Reader, manifest: Manifest) -> _Blocks:
    files = StateFiles(reader, manifest.domain).of(manifest)
    return {(manifest.domain, found.sha256): size for found, size in files if found.kind is BLOCK}


def _side(state: State, blocks: _Blocks, shared: set[tuple[str, str]], common: int) -> Side:
    own = [size for key, size in blocks.items() if key not in shared]
    return Side(state, state.manifest.codec, len(own), sum(own), _turn_at(state.manifest.turns, common))


def _turn_at(turns: Sequence[Turn], token: int) -> TurnAt | None:
    for index, turn in enumerate(turns):
        if turn.start <= token < turn.end:
            return TurnAt(index, turn.role, turn.label)
    return None


def _common_tokens(reader: Reader, a: Manifest, b: Manifest) -> int:
    common = 0
    for page_a, page_b in zip(reader.pages(a), reader.pages(b), strict=False):
        for token_a, token_b in zip(page_a.tokens, page_b.tokens, strict=False):
            if token_a != token_b:
                return common
            common += 1
        if len(page_a.tokens) != len(page_b.tokens):
            return common
    return common
