"""Large arrays in huge pages, if Linux offers them.

A restore into new memory spends most of its time in page faults: on one machine 50 ms for 64 MB in pages of 4 KiB,
and 5 ms in pages of 2 MiB. A process must ask for those (`madvise`) before memory is touched. NumPy does so for its
own arrays; MLX touches new memory at once, unless it loads a file into it. So an array is loaded from a file of zeros
made here, which asks for huge pages, and Linux zeroes each page at its first use: by the thread that reads a block.
"""

import ctypes
import io
import mmap
import sys
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

_WORTH_IT = 4 << 20  # bytes; NumPy's own bound


def zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An evaluated array of zeros on the default device."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if sys.platform == "linux" and on_cpu and prod(shape) * dtype.size >= _WORTH_IT:
        words = mx.load(_Zeros(prod(shape) * dtype.size // 4), format="npy")
        assert isinstance(words, mx.array)
        array = words.view(dtype).reshape(shape)
    else:
        array = mx.zeros(shape, dtype=dtype)
    mx.eval(array)
    return array


class _Zeros(io.BytesIO):
    """A .npy file of uint32 zeros. Only its header exists; the zeros are made in the buffer of the reader."""

    def __init__(self, words: int) -> None:
        super().__init__()
        np.lib.format.write_array_header_1_0(self, {"shape": (words,), "fortran_order": False, "descr": "<u4"})
        self.seek(0)

    def readinto(self, buffer: Any) -> int:
        if read := super().readinto(buffer):
            return read
        memory = np.frombuffer(buffer, np.uint8)
        first = -memory.ctypes.data % mmap.PAGESIZE
        end = first + (memory.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if _renew(memory.ctypes.data + first, end - first):
            memory[:first], memory[end:] = 0, 0
        else:
            memory.fill(0)
        return memory.nbytes


def _renew(address: int, nbytes: int) -> bool:
    """Ask for huge pages, and drop the present ones: Linux then provides zeroed pages at their first use."""
    if sys.platform != "linux":
        return False
    madvise = ctypes.CDLL(None).madvise
    pages = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
    madvise(*pages, mmap.MADV_HUGEPAGE)
    return bool(madvise(*pages, mmap.MADV_DONTNEED) == 0)
