"""Multi-head latent attention on its latents, for models whose file in mlx-lm caches the expanded keys and values.

All heads' keys and values are linear maps of one latent vector per token. The cache keeps that vector and the rotated
part of the key that the heads share, instead of the expanded keys and values: in DeepSeek-Coder-V2-Lite 576 numbers per
token and layer instead of 5,120. The map moves from the cached side to the query, (q, W c) = (Wᵀ q, c), so a decode
step never expands the past; a prefill does, for one layer at a time.

The same sums in another order: logits differ by rounding only. The layer is recognized by its parts, not by its name.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models import base

_PARTS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "rope", "scale", "num_heads", "q_lora_rank")


def absorb(model: Any) -> None:
    """Make every layer of a model that caches expanded latents cache the latents themselves."""
    for layer in getattr(model, "layers", ()):
        inner: Any = getattr(layer, "self_attn", None)
        # an adapter's linear map has another type, and is not replaced
        if all(hasattr(inner, part) for part in _PARTS) and type(inner.kv_b_proj) in (Linear, QuantizedLinear):
            layer.self_attn = LatentAttention(inner)


class LatentAttention(Module):
    """Replaces an attention layer, and keeps its projections."""

    def __init__(self, expanded: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.expanded = expanded
        # kv_b: [heads, key dim + value dim, rank]
        kv_b = _weight(expanded.kv_b_proj).reshape(expanded.num_heads, -1, expanded.kv_lora_rank)
        self.to_keys, self.to_values = mx.split(kv_b, [expanded.qk_nope_head_dim], axis=1)
        del expanded.kv_b_proj

    def __call__(self, x: mx.array, mask: mx.array | str | None, cache: Any) -> mx.array:
        """Attention over x, [batch, tokens, width], and what the cache holds."""
        of = self.expanded
        tokens, offset = x.shape[1], cache.offset
        queries = of.q_proj(x) if of.q_lora_rank is None else of.q_b_proj(of.q_a_layernorm(of.q_a_proj(x)))
        queries = queries.reshape(*x.shape[:2], of.num_heads, -1).swapaxes(1, 2)
        plain, rotated = mx.split(queries, [of.qk_nope_head_dim], axis=-1)
        latent, key_part = mx.split(of.kv_a_proj_with_mqa(x), [of.kv_lora_rank], axis=-1)
        latent = of.kv_a_layernorm(latent)[:, None]  # one head: [batch, 1, tokens, rank]
        latent, key_part = cache.update_and_fetch(latent, of.rope(key_part[:, None], offset))

        bias = (of.rope(rotated, offset) * of.scale) @ key_part.swapaxes(-1, -2)  # [batch, heads, tokens, all tokens]
        visible = base.create_causal_mask(tokens, offset) if isinstance(mask, str) else mask
        if visible is not None:
            bias = mx.where(visible, bias, mx.finfo(bias.dtype).min)
        if tokens == 1:
            out = self._attend(plain @ self.to_keys, latent, latent, bias) @ self.to_values.swapaxes(-1, -2)
        else:
            keys, values = (latent @ map_.swapaxes(-1, -2) for map_ in (self.to_keys, self.to_values))
            out = self._attend(plain, keys, values, bias)
        answer: mx.array = of.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))
        return answer

    def _attend(self, queries: mx.array, keys: mx.array, values: mx.array, bias: mx.array) -> mx.array:
        # looked up at each call: in decode the latents may be a handle, which `attention` replaces this function for
        scale = self.expanded.scale
        out: mx.array = base.scaled_dot_product_attention(queries, keys, values, cache=None, scale=scale, mask=bias)
        return out


def _weight(linear: Any) -> mx.array:
    """The weight of a linear map, [out, in]."""
    if isinstance(linear, QuantizedLinear):
        packed, scales, biases = linear.weight, linear.scales, linear.get("biases")
        return mx.dequantize(packed, scales, biases, group_size=linear.group_size, bits=linear.bits, mode=linear.mode)
    weight: mx.array = linear.weight
    return weight
