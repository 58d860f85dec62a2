"""Layer kinds, and the groups of layers that are stored together.

A layer kind answers every question that depends on what a layer attends to: what a resume needs, which parts are
stored, where its blocks are listed, how far a cache can be cut. Pure arithmetic, without MLX and without a model.
To add a kind, add a class here and an entry to LAYER_KINDS; the engine's side is `amem_cli/engine/cache`.
"""

from collections.abc import Sequence
from math import lcm
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvstore.format.codecs import Axis, Codec, quantized_axis
from kvstore.format.document import Document
from kvstore.format.parts import BLOCK_TOKENS, GROUP_TOKENS, Part, Size

Kind = Literal["full", "window", "recurrent"]


class LayerGroup(Document, frozen=True):
    """The layers that share a kind, head counts and head dims: they are stored together."""

    id: str  # "full-0", "window-1": the kind and the group's place in the model
    kind: Kind
    layers: tuple[Size, ...]  # places in the model's own list of caches
    kv_heads: Size
    key_dim: Size
    value_dim: Size
    window: Annotated[int, Meta(gt=0, lt=1 << 62)] | None = None  # tokens that a query can see, itself included
    states: tuple[Part, ...] = ()  # one layer's state arrays
    latent: bool = False  # "keys" are what keys and values are made of, "values" the rotated part of the keys

    @property
    def layer_kind(self) -> "LayerKind":
        """What depends on the kind."""
        return LAYER_KINDS[self.kind]

    @property
    def joins_decode_batch(self) -> bool:
        """Whether one decode step may run these layers for several agents' rows."""
        return self.layer_kind.joins_decode_batch and not self.latent

    def first_needed(self, position: int) -> int:
        """The first token that a query at `position` can still see; `position` where it sees none by itself."""
        return self.layer_kind.first_needed(self, position)

    def needed_blocks(self, position: int) -> range:
        """The numbers of the full blocks that a resume at `position` needs."""
        return range(self.first_needed(position) // BLOCK_TOKENS, position // BLOCK_TOKENS)


class LayerKind:
    """Full attention: every query sees all tokens before it. Other kinds override what they do otherwise."""

    name: ClassVar[Kind] = "full"
    is_listed_in_pages: ClassVar[bool] = True
    """Whether pages list its blocks: they are never dropped. Else the manifest lists those that are still needed."""
    has_blocks: ClassVar[bool] = True
    """Whether it stores quantized blocks, found again by prefix key. Else it stores a state, valid at one position."""
    cut_tokens: ClassVar[int | None] = GROUP_TOKENS
    """A cache can be cut back to every multiple of so many tokens; None: only to a position that was committed."""
    joins_decode_batch: ClassVar[bool] = True
    """Whether its attention runs for several agents' rows in one decode step."""

    def first_needed(self, group: LayerGroup, position: int) -> int:  # noqa: ARG002 (windows depend on both)
        return 0

    def is_sound(self, group: LayerGroup) -> bool:
        """Whether the group's sizes can be those of a model."""
        sizes = (len(group.layers), group.kv_heads, group.key_dim, group.value_dim)
        return all(sizes) and not group.states and (group.window is not None) == (self.name == "window")

    def quantized_parts(self, group: LayerGroup, codec: Codec, tokens: int) -> list[Part]:
        """The quantized keys and values of `tokens` tokens, a multiple of 64."""
        layers, heads = len(group.layers), group.kv_heads
        key_axis, value_axis = stored_axes(group, codec)
        keys = _codes("k", key_axis, codec, (layers, heads), tokens, group.key_dim)
        values = _codes("v", value_axis, codec, (layers, heads), tokens, group.value_dim)
        return keys + values

    def refined_tokens(self, codec: Codec) -> int:
        """How many of the first tokens have a second layer of codes."""
        return codec.refined

    def recent_parts(self, group: LayerGroup, tokens: int) -> list[Part]:
        """The keys and values of up to 63 recent tokens, in bfloat16."""
        lead = (len(group.layers), group.kv_heads, tokens)
        return [
            Part("recent.k", "BF16", (*lead, group.key_dim)),
            Part("recent.v", "BF16", (*lead, group.value_dim)),
        ]

    def state_parts(self, group: LayerGroup) -> list[Part]:  # noqa: ARG002 (recurrent layers have some)
        """The states of all layers of the group, [layers, *one layer's shape] each."""
        return []


class WindowKind(LayerKind):
    """Sliding-window attention: a query sees the last `window` tokens, itself included."""

    name = "window"
    is_listed_in_pages = False
    cut_tokens = None

    def first_needed(self, group: LayerGroup, position: int) -> int:
        assert group.window is not None
        return max(0, position - group.window + 1)

    def refined_tokens(self, codec: Codec) -> int:  # noqa: ARG002 (the window leaves the first tokens behind)
        return 0


class RecurrentKind(LayerKind):
    """Recurrent layers: no keys and values but a state, in full precision, of all tokens before it."""

    name = "recurrent"
    is_listed_in_pages = False
    has_blocks = False
    cut_tokens = None
    joins_decode_batch = False

    def first_needed(self, group: LayerGroup, position: int) -> int:  # noqa: ARG002
        return position

    def is_sound(self, group: LayerGroup) -> bool:
        sizes = (group.kv_heads, group.key_dim, group.value_dim)
        return bool(group.layers and group.states) and not any(sizes) and group.window is None

    def quantized_parts(self, group: LayerGroup, codec: Codec, tokens: int) -> list[Part]:  # noqa: ARG002
        return []

    def refined_tokens(self, codec: Codec) -> int:  # noqa: ARG002
        return 0

    def recent_parts(self, group: LayerGroup, tokens: int) -> list[Part]:  # noqa: ARG002
        return []

    def state_parts(self, group: LayerGroup) -> list[Part]:
        return [Part(part.name, part.dtype, (len(group.layers), *part.shape)) for part in group.states]


def cut_position(groups: Sequence[LayerGroup], position: int) -> int:
    """The last position up to `position` to which caches of all these layer groups can be cut back; 0 if to none."""
    cuts = [group.layer_kind.cut_tokens for group in groups]
    steps = [cut for cut in cuts if cut is not None]
    return position // lcm(*steps) * lcm(*steps) if len(steps) == len(cuts) else 0


FULL, WINDOW, RECURRENT = LayerKind(), WindowKind(), RecurrentKind()
LAYER_KINDS: dict[Kind, LayerKind] = {kind.name: kind for kind in (FULL, WINDOW, RECURRENT)}


def stored_axes(group: LayerGroup, codec: Codec) -> tuple[Axis, Axis]:
    """The axes along which a layer group's keys and values are quantized. Both parts of latents are key-like."""
    value_axis = codec.key_axis if group.latent else codec.value_axis
    return quantized_axis(codec.key_axis, group.key_dim), quantized_axis(value_axis, group.value_dim)


def _codes(name: str, axis: Axis, codec: Codec, lead: tuple[int, int], tokens: int, dim: int) -> list[Part]:
    """Codes, scales and biases of keys or values: the quantized axis comes last. `lead`: layers, heads.

    Along the tokens: packed [layers, heads, dim, words], scales and biases [layers, heads, dim, tokens / 64].
    Along the channels: packed [layers, heads, tokens, words], scales and biases [layers, heads, tokens, dim / 64].
    """
    rows, length = (dim, tokens) if axis == "token" else (tokens, dim)
    scale = (*lead, rows, length // GROUP_TOKENS)
    return [
        Part(f"{name}.packed", "U32", (*lead, rows, codec.words(length))),
        Part(f"{name}.scales", "BF16", scale),
        Part(f"{name}.biases", "BF16", scale),
    ]


def quantized_parts(group: LayerGroup, codec: Codec, tokens: int = BLOCK_TOKENS) -> list[Part]:
    """The quantized keys and values of `tokens` tokens (a multiple of 64) of one layer group."""
    return group.layer_kind.quantized_parts(group, codec, tokens)


def refined_parts(group: LayerGroup, codec: Codec) -> list[Part]:
    """The second layer of codes of the first tokens. Each part's name begins with `rest.`."""
    refined = group.layer_kind.refined_tokens(codec)
    parts = quantized_parts(group, codec, refined) if refined else []
    return [Part(f"rest.{part.name}", part.dtype, part.shape) for part in parts]


def recent_parts(group: LayerGroup, tokens: int) -> list[Part]:
    """The keys and values of up to 63 recent tokens of one layer group, in bfloat16."""
    return group.layer_kind.recent_parts(group, tokens)


def state_parts(group: LayerGroup) -> list[Part]:
    """The states of all layers of one layer group; only recurrent layers have any."""
    return group.layer_kind.state_parts(group)


def block_parts(group: LayerGroup, codec: Codec, position: int) -> list[Part]:
    """All parts of the block file at `position`, in file order: token ids, quantized keys and values, what refines."""
    parts = [Part("tokens", "I32", (BLOCK_TOKENS,)), *quantized_parts(group, codec)]
    return parts if position else parts + refined_parts(group, codec)


def tail_parts(groups: tuple[LayerGroup, ...], codec: Codec, cached: int) -> list[Part]:
    """All parts of the tail file of an agent at `cached` tokens, in file order.

    For each layer group: the whole groups of 64 behind the last full block and what refines them, recent tokens, and
    states. Each name begins with the layer group's id.
    """
    tokens = cached % BLOCK_TOKENS
    whole, recent = tokens // GROUP_TOKENS * GROUP_TOKENS, tokens % GROUP_TOKENS
    parts: list[Part] = []
    for group in groups:
        own = quantized_parts(group, codec, whole) if whole else []
        own += refined_parts(group, codec) if whole and cached == tokens else []
        own += recent_parts(group, recent) if recent else []
        own += state_parts(group)
        parts += [Part(f"{group.id}.{part.name}", part.dtype, part.shape) for part in own]
    return parts


def bytes_per_token(group: LayerGroup, codec: Codec) -> float:
    """Bytes that one token of this layer group takes in a block, token ids and what refines the first left out."""
    return sum(part.nbytes for part in quantized_parts(group, codec)) / BLOCK_TOKENS


def fp16_bytes_per_token(group: LayerGroup) -> int:
    """Bytes that one token of this layer group takes in float16."""
    return 2 * len(group.layers) * group.kv_heads * (group.key_dim + group.value_dim)
