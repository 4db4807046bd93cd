"""Small shared parts: norm, rotary positions, projections, weights in their formats."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from trace_jax.fp4 import Format, QTensor, fake_quant_unscaled, formats, unscaled
from trace_jax.model.config import Yarn

Dtype = jnp.bfloat16  # of activations and of weights in use, by default; masters are FP32
PLAIN = Yarn()  # no YaRN
# Parameters that rollouts, too, use in FP32.
KEPT_FP32 = (
    "router",
    "router_bias",
    "sinks",
    "attention_norm",
    "moe_norm",
    "q_norm",
    "k_norm",
    "final_norm",
)


def precision_of(dtype) -> jax.lax.Precision | None:
    """FP32 operands are multiplied as FP32: accelerators would take TF32 or BF16."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def rounded(x: jax.Array, dtype=Dtype) -> jax.Array:
    """`x` in `dtype`, rounded in every program.

    XLA drops a cast to BF16 that meets a cast back, depending on what it fuses: decode
    and training would then round at different places and their logits be 1 % apart.
    """
    return formats.fp32_source(x, dtype).astype(dtype)


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """FP32 einsum of two arrays of one dtype."""
    precision = precision_of(a.dtype)
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32, precision=precision)


def stored(weight: jax.Array, dtype=Dtype) -> jax.Array:
    """A weight in `dtype`: as it stands where it is held so (rollout), else rounded (master).

    Rounding what is BF16 already would be a copy of the weight at every step.
    """
    return weight if weight.dtype == jnp.dtype(dtype) else rounded(weight, dtype)


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
    """y = x W^T (+ bias), weight [features, inputs], FP32 accumulation, `dtype` in and out."""

    features: int
    bias: bool = False
    dtype: jnp.dtype = Dtype

    @nn.compact
    def __call__(self, x):
        inputs = x.shape[-1]
        weight = self.param("weight", normal_init(inputs), (self.features, inputs), jnp.float32)
        y = product("...k,nk->...n", x.astype(self.dtype), stored(weight, self.dtype))
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
            bias = rounded(bias, self.dtype).astype(jnp.float32)
            y = y + jnp.expand_dims(bias, range(y.ndim - 1))
        return rounded(y, self.dtype)


def frequencies(half: int, theta: float, yarn: Yarn = PLAIN) -> jax.Array:
    """FP32 [half] radians a position of each rotary pair.

    With YaRN, pairs that turn more than `beta_fast` times within the original context
    are kept, those that turn less than `beta_slow` times are slowed by `factor`, and a
    linear ramp over the pair's index joins the two.
    """
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if yarn.factor == 1.0:
        return frequency

    def pair_with(turns: float) -> float:
        return half * math.log(yarn.original_positions / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high = high if high > low else low + 0.001
    stretched = jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / (high - low), 0, 1)
    return frequency * (1 - stretched) + frequency / yarn.factor * stretched


def angles(
    positions: jax.Array, half: int, theta: float, yarn: Yarn = PLAIN
) -> tuple[jax.Array, jax.Array]:
    """FP32 cosine and sine [..., half] of the rotation at `positions` int32 [...]."""
    frequency = jnp.expand_dims(frequencies(half, theta, yarn), range(positions.ndim))
    angle = positions[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if yarn.factor != 1.0:
        cos, sin = cos * yarn.scale, sin * yarn.scale
    return cos, sin


def rotary(x: jax.Array, positions: jax.Array, theta: float, yarn: Yarn = PLAIN) -> jax.Array:
    """Rotary embedding, half-split pairs; x [B, S, heads, head_dim], positions [B, S]."""
    cos, sin = (a[:, :, None] for a in angles(positions, x.shape[-1] // 2, theta, yarn))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return rounded(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1), x.dtype)


class ExpertWeight(NamedTuple):
    """Weight as a product consumes it: [E, N, K] and the FP32 outer scale [E, 1, 1].

    `values` is code x block scale, exact in BF16; `outer` multiplies the FP32
    product. None where the weight is not quantized.
    """

    values: jax.Array
    outer: jax.Array | None


def expert_weight(weight, fmt: Format | None, dtype=Dtype) -> ExpertWeight:
    """The rollout's and the trainer's one way to an expert weight [E, N, K].

    A QTensor is decoded; an array is fake-quantized (straight-through) from its
    BF16-rounded values if `fmt` is given; an ExpertWeight passes.
    """
    if isinstance(weight, ExpertWeight):
        return ExpertWeight(weight.values.astype(dtype), weight.outer)
    if isinstance(weight, QTensor):
        return ExpertWeight(unscaled(weight, dtype), weight.outer)
    if fmt is None:
        return ExpertWeight(stored(weight, dtype), None)
    values, outer = fake_quant_unscaled(rounded(weight), fmt, outer_axes=(1, 2))
    return ExpertWeight(values.astype(dtype), outer)
