"""Small shared parts: norm, rotary positions, projections, weights in their formats."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from trace_jax.fp4 import Format, QTensor, fake_quant_unscaled, formats, unscaled

Dtype = jnp.bfloat16  # of activations and of weights in use; masters are FP32


def rounded(x: jax.Array, dtype=Dtype) -> jax.Array:
    """`x` in `dtype`, rounded in every program.

    XLA drops a cast to BF16 that meets a cast back, depending on what it fuses: decode
    and training would then round at different places and their logits be 1 % apart.
    """
    return formats.fp32_source(x, dtype).astype(dtype)


def normal_init(fan_in: int):
    return nn.initializers.normal(stddev=fan_in**-0.5)


class RMSNorm(nn.Module):
    """RMS norm over the last axis, computed in FP32, returned in x's dtype."""

    eps: float

    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        weight = jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))
        return rounded(x32 * jax.lax.rsqrt(variance + self.eps) * weight, x.dtype)


class Linear(nn.Module):
    """y = x W^T, weight [features, inputs], FP32 accumulation, BF16 out."""

    features: int

    @nn.compact
    def __call__(self, x):
        inputs = x.shape[-1]
        weight = self.param("weight", normal_init(inputs), (self.features, inputs), jnp.float32)
        y = jnp.einsum(
            "...k,nk->...n",
            x.astype(Dtype),
            rounded(weight),
            preferred_element_type=jnp.float32,
        )
        return rounded(y)


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding, half-split pairs; x [B, S, heads, head_dim], positions [B, S]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency.reshape(1, 1, 1, half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return rounded(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1), x.dtype)


class ExpertWeight(NamedTuple):
    """Weight as a product consumes it: BF16 [E, N, K] and the FP32 outer scale [E, 1, 1].

    `values` is code x block scale, exact in BF16; `outer` multiplies the FP32
    product. None where the weight is BF16.
    """

    values: jax.Array
    outer: jax.Array | None


def expert_weight(weight, fmt: Format | None) -> ExpertWeight:
    """The rollout's and the trainer's one way to an expert weight [E, N, K].

    A QTensor is decoded; an array is fake-quantized (straight-through) from its
    BF16-rounded values if `fmt` is given; an ExpertWeight passes.
    """
    if isinstance(weight, ExpertWeight):
        return weight
    if isinstance(weight, QTensor):
        return ExpertWeight(unscaled(weight), weight.outer)
    weight = rounded(weight)
    if fmt is None:
        return ExpertWeight(weight, None)
    values, outer = fake_quant_unscaled(weight, fmt, outer_axes=(1, 2))
    return ExpertWeight(values.astype(Dtype), outer)
