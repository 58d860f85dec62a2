"""Linear layers row by row, against float64, and against what a row has alone."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from amem_cli.engine.backend.mkl_rows import BLOCK_BYTES, block_outputs, by_row, install

ROUNDING = 1e-4
# [outputs, inputs]: one block, five, a large one, and inputs of which few outputs fill a block
SHAPES = ((64, 128), (640, 2048), (8192, 640), (96, 15360))


def exact(x: mx.array, weight: mx.array, bias: mx.array) -> np.ndarray:
    x64, w64, b64 = (np.array(array, np.float64) for array in (x, weight, bias))
    out: np.ndarray = x64 @ w64.T + b64
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [3, 4, 7])
def test_product_is_that_of_float64(shape: tuple[int, int], rows: int) -> None:
    weight = mx.random.normal(shape) / shape[1] ** 0.5
    x, bias = mx.random.normal((rows, 1, shape[1])), mx.random.normal(shape[:1])
    for b in (None, bias):
        out = by_row(x, weight, b)
        assert out.shape == (rows, 1, shape[0])
        expected = exact(x, weight, mx.zeros_like(bias) if b is None else b)
        assert np.abs(np.array(out) - expected).max() < ROUNDING


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_layers_give_each_row_what_it_has_alone(shape: tuple[int, int], bias: bool) -> None:
    install()
    install()
    linear = Linear(shape[1], shape[0], bias=bias)
    head = Embedding(*shape)
    x = mx.random.normal((4, 1, shape[1]))
    for layer in (linear, head.as_linear):
        together = layer(x)
        alone = mx.concatenate([layer(x[i : i + 1]) for i in range(4)])
        assert mx.allclose(together, alone, rtol=1e-5, atol=ROUNDING)


def test_blocks_divide_the_outputs_and_stay_small() -> None:
    for outputs, inputs in (*SHAPES, (151936, 896), (262144, 640), (501009, 768)):
        block = block_outputs(outputs, inputs)
        assert outputs % block == 0
        assert block * inputs * 4 <= BLOCK_BYTES


@pytest.mark.parametrize("shape", [(2, 1, 640), (1, 300, 640), (4, 2, 640), (4, 640)])
def test_other_passes_and_uneven_weights_are_left_to_one_matmul(shape: tuple[int, ...]) -> None:
    install()
    linear = Linear(640, 2048, bias=False)
    x = mx.random.normal(shape)
    assert mx.array_equal(linear(x), x @ linear.weight.T)
    uneven = Linear(640, 1009, bias=False)
    steps = mx.random.normal((4, 1, 640))
    assert mx.array_equal(uneven(steps), steps @ uneven.weight.T)
