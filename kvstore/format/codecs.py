"""Codecs: how keys and values become codes. A state keeps the meaning of the codec that it names."""

from typing import Annotated, Literal

from msgspec import Meta

from kvstore.format.document import Document
from kvstore.format.parts import GROUP_TOKENS

Axis = Literal["token", "channel"]


class Codec(Document, frozen=True):
    """How keys and values become codes: the axis along which 64 elements share a scale and a bias.

    The first `refined` tokens of a full-attention layer, 0 or 64 of them, have a second layer of codes: of what the
    first one left over. Two layers of 4 bits are as good as 8. Every query looks at those tokens (they are the
    attention sink), so their error is in every answer.
    """

    name: str
    bits: Literal[4, 8]
    key_axis: Axis
    value_axis: Axis
    refined: Annotated[int, Meta(ge=0, le=GROUP_TOKENS)] = 0

    def words(self, elements: int) -> int:
        """uint32 words that hold the codes of `elements` elements."""
        return elements * self.bits // 32


CODECS = {
    codec.name: codec
    for codec in (
        Codec("q4-sink", 4, "token", "channel", refined=GROUP_TOKENS),
        Codec("q4-channel", 4, "token", "channel"),
        Codec("q8-channel", 8, "token", "channel"),
        Codec("q4-token", 4, "channel", "channel"),
        Codec("q8-token", 8, "channel", "channel"),
    )
}


DEFAULT_CODEC = "q4-sink"


def quantized_axis(axis: Axis, dim: int) -> Axis:
    """The axis really used: a head dim that 64 does not divide is grouped along the tokens instead."""
    return axis if dim % GROUP_TOKENS == 0 else "token"
