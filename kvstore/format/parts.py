"""TODO."""

from dataclasses import dataclass
from math import prod
from typing import Literal

GROUP_TOKENS = 64  # the unit of quantization


BLOCK_TOKENS = 256  # the unit of storage


GROUPS_PER_BLOCK = BLOCK_TOKENS // GROUP_TOKENS


Dtype = Literal["I32", "U32", "BF16", "F16", "F32"]  # as safetensors writes them


DTYPE_BYTES: dict[Dtype, int] = {"I32": 4, "U32": 4, "BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class Part:
    """One array of a block or a tail."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]
