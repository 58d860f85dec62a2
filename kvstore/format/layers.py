"""TODO."""

from dataclasses import dataclass
from typing import Literal

from kvstore.format.codecs import Axis, Codec, quantized_axis
from kvstore.format.parts import BLOCK_TOKENS, GROUP_TOKENS, Part

Kind = Literal["full", "window", "recurrent"]


@dataclass(frozen=True)
class LayerGroup:
    """The layers that share a kind, head counts and head dims: they are stored together.

    A recurrent layer has no keys and values but a state, in full precision, that is valid at one position only.
    """

    id: str  # "full-0", "window-1": the kind and the group's place in the model
    kind: Kind
    layers: tuple[int, ...]  # places in the model's own list of caches
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # tokens that a query can see, itself included
    states: tuple[Part, ...] = ()  # one layer's state arrays
    latent: bool = False  # "keys" are what keys and values are made of, "values" the rotated part of the keys

    def first_needed(self, position: int) -> int:
        """The first token that a query at `position` can still see; `position` where it sees none by itself."""
        if self.kind == "recurrent":
            return position
        return 0 if self.window is None else max(0, position - self.window + 1)


def stored_axes(group: LayerGroup, codec: Codec) -> tuple[Axis, Axis]:
    """The axes along which a layer group's keys and values are quantized. Both parts of latents are key-like."""
    value_axis = codec.key_axis if group.latent else codec.value_axis
    return quantized_axis(codec.key_axis, group.key_dim), quantized_axis(value_axis, group.value_dim)


def _stored(name: str, axis: Axis, codec: Codec, layers: int, heads: int, tokens: int, dim: int) -> list[Part]:
    """Codes, scales and biases of keys or values: the quantized axis comes last.

    Along the tokens: packed [layers, heads, dim, words], scales and biases [layers, heads, dim, tokens / 64].
    Along the channels: packed [layers, heads, tokens, words], scales and biases [layers, heads, tokens, dim / 64].
    """
    rows, length = (dim, tokens) if axis == "token" else (tokens, dim)
    lead = (layers, heads, rows)
    scale = (*lead, length // GROUP_TOKENS)
    return [
        Part(f"{name}.packed", "U32", (*lead, codec.words(length))),
        Part(f"{name}.scales", "BF16", scale),
        Part(f"{name}.biases", "BF16", scale),
    ]


def quantized_parts(group: LayerGroup, codec: Codec, tokens: int = BLOCK_TOKENS) -> list[Part]:
    """The quantized keys and values of `tokens` tokens (a multiple of 64) of one layer group."""
    if group.kind == "recurrent":
        return []
    layers, heads = len(group.layers), group.kv_heads
    key_axis, value_axis = stored_axes(group, codec)
    keys = _stored("k", key_axis, codec, layers, heads, tokens, group.key_dim)
    values = _stored("v", value_axis, codec, layers, heads, tokens, group.value_dim)
    return keys + values


def refined_parts(group: LayerGroup, codec: Codec) -> list[Part]:
    """The second layer of codes of the first tokens: the codes of so many tokens, each part's name led by `rest.`."""
    if group.kind != "full" or not codec.refined:
        return []
    parts = quantized_parts(group, codec, codec.refined)
    return [Part(f"rest.{part.name}", part.dtype, part.shape) for part in parts]


def recent_parts(group: LayerGroup, tokens: int) -> list[Part]:
    """The keys and values of up to 63 recent tokens, in bfloat16."""
    if group.kind == "recurrent":
        return []
    lead = (len(group.layers), group.kv_heads, tokens)
    return [
        Part("recent.k", "BF16", (*lead, group.key_dim)),
        Part("recent.v", "BF16", (*lead, group.value_dim)),
    ]


def state_parts(group: LayerGroup) -> list[Part]:
    """The states of all layers of a recurrent group, [layers, *one layer's shape] each."""
    return [Part(part.name, part.dtype, (len(group.layers), *part.shape)) for part in group.states]


def block_parts(group: LayerGroup, codec: Codec, position: int) -> list[Part]:
    """All parts of the block file at `position`, in file order: token ids, quantized keys and values, what refines."""
    parts = [Part("tokens", "I32", (BLOCK_TOKENS,)), *quantized_parts(group, codec)]
    return parts if position else parts + refined_parts(group, codec)


def tail_parts(groups: tuple[LayerGroup, ...], codec: Codec, cached: int) -> list[Part]:
    """All parts of the tail file of an agent at `cached` tokens, in file order.

    For each layer group: the whole groups of 64 behind the last full block and what refines them, recent tokens, and
    states. Names are led by the layer group's id.
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
