"""The linear layers of a decode step of several agents, on MKL.

From three rows on MKL packs a weight matrix before it multiplies, which takes longer than reading it. With one row it
packs nothing, and its speed is that of reading the weights: from memory for the first row, from the cores' caches for
the others, as long as the weights stay there. So the weights are split into blocks that fit into the caches, and each
block is multiplied by all rows in turn: one batched matmul in the order [blocks, rows].

Each of these products has the shape of a single row's step, and MKL gave the same bits for it in all shapes tried.
"""

from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from amem_cli.engine.backend.blas import preload

FEWEST_ROWS = 3  # two are one matmul, which reads the weights once and packs nothing
BLOCK_BYTES = 1 << 20  # what the cores' second-level caches hold together
LEAST_OUTPUTS = 16  # of a block: the overhead of a call must stay small

_linear: Any = Linear.__call__
_as_linear: Any = Embedding.as_linear


def install() -> None:
    """Make linear layers and tied heads multiply several rows in this way. Calling it again is harmless."""
    if preload().name == "mkl":
        Linear.__call__ = _call_linear  # type: ignore[method-assign,assignment]
        Embedding.as_linear = _call_as_linear  # type: ignore[method-assign]


def _call_linear(layer: Any, x: mx.array) -> Any:
    return by_row(x, layer.weight, layer.get("bias")) if _applies(x, layer.weight) else _linear(layer, x)


def _call_as_linear(layer: Any, x: mx.array) -> Any:
    return by_row(x, layer.weight) if _applies(x, layer.weight) else _as_linear(layer, x)


def _applies(x: mx.array, weight: mx.array) -> bool:
    """Whether x is a step of several agents, one token each, and the weights are float32 and can be split."""
    step = x.ndim == 3 and x.shape[0] >= FEWEST_ROWS and x.shape[1] == 1
    return step and x.dtype == weight.dtype == mx.float32 and block_outputs(*weight.shape) >= LEAST_OUTPUTS


@cache
def block_outputs(outputs: int, inputs: int) -> int:
    """Outputs of one block of a float32 weight matrix [outputs, inputs]: the largest divisor that fits, else 0."""
    most = min(outputs, BLOCK_BYTES // (4 * inputs))
    return next((n for n in range(most, 0, -1) if outputs % n == 0), 0)


def by_row(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    """x [rows, 1, inputs] times the transpose of weight [outputs, inputs], and a bias [outputs]: [rows, 1, outputs]."""
    rows, inputs = x.shape[0], x.shape[2]
    outputs = block_outputs(*weight.shape)
    blocks = weight.reshape(-1, 1, outputs, inputs).swapaxes(-1, -2)
    # out: [blocks, rows, 1, outputs of a block]
    out = x @ blocks if bias is None else mx.addmm(bias.reshape(-1, 1, 1, outputs), x, blocks)
    return out.transpose(1, 2, 0, 3).reshape(rows, 1, -1)
