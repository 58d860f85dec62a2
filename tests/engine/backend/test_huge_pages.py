"""Large arrays of zeros: in MLX's memory, writable by the host, and zero whatever that memory held before."""

import mlx.core as mx
import pytest

from amem_cli.engine.backend.huge_pages import zeros
from amem_cli.engine.cache.slabs import host_view


@pytest.mark.parametrize("megabytes", [1, 5, 40])  # MLX's own zeros; from the heap; a mapping of its own
@pytest.mark.parametrize("dtype", [mx.uint16, mx.uint32])
def test_zero_whatever_was_there_before(megabytes: int, dtype: mx.Dtype) -> None:
    shape = (megabytes, (1 << 20) // dtype.size)
    for _ in range(4):  # what one round frees the next may get
        array = zeros(shape, dtype)
        view = host_view(array)
        assert array.shape == shape
        assert array.dtype == dtype
        assert not view.any()
        view.fill(7)
        assert mx.all(array == 7).item()
        del array, view
