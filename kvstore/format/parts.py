"""The arrays that a block or a tail is made of, and the units of quantization and storage."""

from math import prod
from typing import Annotated, Literal

from msgspec import Meta

from kvstore.format.document import Document

GROUP_TOKENS = 64  # the unit of quantization
BLOCK_TOKENS = 256  # the unit of storage
GROUPS_PER_BLOCK = BLOCK_TOKENS // GROUP_TOKENS

Dtype = Literal["I32", "U32", "BF16", "F16", "F32"]  # as safetensors writes them
DTYPE_BYTES: dict[Dtype, int] = {"I32": 4, "U32": 4, "BF16": 2, "F16": 2, "F32": 4}
Size = Annotated[int, Meta(ge=0, lt=1 << 24)]
"""One dimension of an array, or a number of heads or layers."""


class Part(Document, frozen=True):
    """One array of a block or a tail."""

    name: str
    dtype: Dtype
    shape: tuple[Size, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]
