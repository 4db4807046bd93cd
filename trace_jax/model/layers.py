"""Small shared parts: norm, rotary positions, projections, weights in their formats."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from trace_jax.fp4 import Format, QTensor, fake_quant_unscaled, formats, straight_through, unscaled
from trace_jax.kernels.dispatch import platform
from trace_jax.model.config_parts import Llama3Rope, Yarn

Dtype = jnp.bfloat16  # of activations and of weights in use, by default; masters are FP32
PLAIN = Yarn()  # no YaRN
# Parameters that rollouts, too, use in FP32.
KEPT_FP32 = (
    "router",
    "router_bias",
    "router_correction",
    "sinks",
    "attention_norm",
    "moe_norm",
    "q_norm",
    "k_norm",
    "latent_q_norm",
    "latent_norm",
    "out_norm",
    "decay",
    "decay_bias",
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


def made_once(x: jax.Array) -> jax.Array:
    """x, for what gathers from it: a value that is made and stored before it is read.

    XLA would else make it again at each place that a row is gathered to, which for experts'
    weights is each tile of tokens. Not for what is stored already: of a rollout's weights only
    the tiles in use are to be read.
    """
    if platform() == "cpu":  # where XLA forgets barriers before it fuses, but not a branch
        return straight_through(x, jax.lax.cond(x.ravel()[0] == 0, jnp.array, jnp.array, x))
    return jax.lax.optimization_barrier(x)


def normal_init(fan_in: int):
    return nn.initializers.normal(stddev=fan_in**-0.5)


class RMSNorm(nn.Module):
    """RMS norm over the last axis, computed in FP32, returned in x's dtype.

    `zero_centred` norms multiply by 1 + weight.
    """

    eps: float
    zero_centred: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.zeros if self.zero_centred else nn.initializers.ones
        weight = self.param("weight", init, (x.shape[-1],), jnp.float32)
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        weight = jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))
        if self.zero_centred:
            weight = 1 + weight
        return rounded(x32 * jax.lax.rsqrt(variance + self.eps) * weight, x.dtype)


class Linear(nn.Module):
    """y = x W^T (+ bias), weight [features, inputs], FP32 accumulation, `dtype` in and out.

    `raw`: FP32 out, not rounded.
    """

    features: int
    bias: bool = False
    dtype: jnp.dtype = Dtype
    raw: bool = False

    @nn.compact
    def __call__(self, x):
        inputs = x.shape[-1]
        weight = self.param("weight", normal_init(inputs), (self.features, inputs), jnp.float32)
        y = product("...k,nk->...n", x.astype(self.dtype), stored(weight, self.dtype))
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
            bias = rounded(bias, self.dtype).astype(jnp.float32)
            y = y + jnp.expand_dims(bias, range(y.ndim - 1))
        return y if self.raw else rounded(y, self.dtype)


class Mlp(nn.Module):
    """A plain gated MLP, `dtype` in and out; no quantization site."""

    width: int

    @nn.compact
    def __call__(self, x):
        gate = Linear(self.width, dtype=x.dtype, name="gate")(x).astype(jnp.float32)
        up = Linear(self.width, dtype=x.dtype, name="up")(x).astype(jnp.float32)
        mid = rounded(jax.nn.silu(gate) * up, x.dtype)
        return Linear(x.shape[-1], dtype=x.dtype, name="down")(mid)


def frequencies(half: int, theta: float, scaling: Yarn | Llama3Rope = PLAIN) -> jax.Array:
    """FP32 [half] radians a position of each rotary pair."""
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling.factor == 1.0:
        return frequency
    kept = _kept_by_llama3 if isinstance(scaling, Llama3Rope) else _kept_by_yarn
    kept = kept(frequency, theta, scaling)
    return frequency * kept + frequency / scaling.factor * (1 - kept)


def _kept_by_yarn(frequency, theta: float, yarn: Yarn) -> jax.Array:
    """Share of each pair's frequency that is kept.

    All of it for pairs that turn more than `beta_fast` times within the original context,
    none for those that turn less than `beta_slow` times; a linear ramp over the pair's
    index joins the two.
    """
    half = frequency.shape[0]

    def pair_with(turns: float) -> float:
        return half * math.log(yarn.original_positions / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high = high if high > low else low + 0.001
    return 1 - jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / (high - low), 0, 1)


def _kept_by_llama3(frequency, theta: float, rope: Llama3Rope) -> jax.Array:
    """The same, with a ramp over the turns within the original context."""
    turns = rope.original_positions * frequency / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    return jnp.clip((turns - low) / (high - low), 0, 1)


def angles(
    positions: jax.Array, half: int, theta: float, scaling: Yarn | Llama3Rope = PLAIN
) -> tuple[jax.Array, jax.Array]:
    """FP32 cosine and sine [..., half] of the rotation at `positions` int32 [...]."""
    frequency = jnp.expand_dims(frequencies(half, theta, scaling), range(positions.ndim))
    angle = positions[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if isinstance(scaling, Yarn) and scaling.factor != 1.0:
        cos, sin = cos * scaling.scale, sin * scaling.scale
    return cos, sin


def rotary(
    x: jax.Array,
    positions: jax.Array,
    theta: float,
    scaling: Yarn | Llama3Rope = PLAIN,
    fraction: float = 1.0,
) -> jax.Array:
    """Rotary embedding, half-split pairs; x [B, S, heads, head_dim], positions [B, S].

    Only the leading `fraction` of a head is turned.
    """
    half = round(x.shape[-1] * fraction) // 2
    cos, sin = (a[:, :, None] for a in angles(positions, half, theta, scaling))
    a, b, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    return rounded(jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1), x.dtype)


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
        values = stored(weight, dtype)
        return ExpertWeight(values if values is weight else made_once(values), None)
    values, outer = fake_quant_unscaled(rounded(weight), fmt, outer_axes=(1, 2))
    return ExpertWeight(made_once(values.astype(dtype)), outer)
