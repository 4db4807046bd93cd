"""FP4 rounding as one `jax.custom_vjp` primitive: nearest, stochastic, guided.

`fp4_round` works on values that stand beside their scale; blocks, outer scales
and storage are the callers' business. Forward: scale * codeword. Backward:
straight through, for every mode.
"""

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from trace_jax.fp4 import formats
from trace_jax.fp4.formats import NVFP4, Format

Mode = Literal["nearest", "stochastic", "one_bit", "four_bit", "replay"]


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Static part of a rounding.

    Attributes:
      mode: "nearest" (ties to even), "stochastic" (hint: FP32 uniforms in
        [0, 1)), "one_bit" (hint: mantissa bits; TRACE section 2), "four_bit"
        (hint: codes; the neighbour nearest to the rollout's codeword) or
        "replay" (hint: codes; the rollout's codeword itself).
      clip_gradient: zero gradient where |x / scale| > 6, which the forward clips.
    """

    mode: Mode = "nearest"
    clip_gradient: bool = False


NEAREST = Rounding()


def midpoints(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """FP32: |x / scale|, at most 6; the midpoint between its neighbours; their distance."""
    low, _ = formats.bracket_e2m1(x, scale)
    magnitude = jnp.minimum(jnp.abs(formats.divide(x, scale)), formats.E2M1_MAX)
    step = formats.grid_step(magnitude)
    return magnitude, jnp.abs(formats.decode_e2m1(low)) + 0.5 * step, step


def _guided(x, scale, hint, guard, mode: Mode):
    """Signed codes of the bracket's end that the hint asks for."""
    low, high = formats.bracket_e2m1(x, scale)
    if mode == "one_bit":
        take_low = formats.mantissa_bits(low) == hint
    else:
        wanted = formats.decode_e2m1(hint)
        below, above = formats.decode_e2m1(low), formats.decode_e2m1(high)
        take_low = jnp.abs(below - wanted) <= jnp.abs(above - wanted)
    chosen = jnp.where(take_low, low, high)
    if guard is not None:
        magnitude, middle, step = midpoints(x, scale)
        near = jnp.abs(magnitude - middle) <= guard * step
        chosen = jnp.where(near, chosen, formats.encode_e2m1(x, scale))
    return chosen


def round_codes(spec: Rounding, x, scale, hint=None, guard=None, obey=None) -> jax.Array:
    """uint8 codes of FP32 `x` / `scale` under `spec`.

    Args:
      hint: what the mode consumes, of x's shape; None for "nearest".
      guard: None, or the width (in steps, 0..0.5, broadcastable) around the
        rounding midpoint inside which a bit is obeyed; outside, nearest.
      obey: None, or booleans (broadcastable); where False, nearest.
    """
    if spec.mode == "nearest":
        return formats.encode_e2m1(x, scale)
    if spec.mode == "stochastic":
        low, high = formats.bracket_e2m1(x, scale)
        magnitude = jnp.minimum(jnp.abs(formats.divide(x, scale)), formats.E2M1_MAX)
        up = hint < (magnitude - jnp.abs(formats.decode_e2m1(low))) / formats.grid_step(magnitude)
        codes = jnp.where(up, high, low)
    elif spec.mode == "replay":
        codes = jnp.broadcast_to(hint, x.shape)
    elif spec.mode in ("one_bit", "four_bit"):
        codes = _guided(x, scale, hint, guard, spec.mode)
    else:
        raise ValueError(f"unknown rounding mode {spec.mode!r}")
    return codes if obey is None else jnp.where(obey, codes, formats.encode_e2m1(x, scale))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp4_round(spec: Rounding, x, scale, hint=None, guard=None, obey=None):
    """(scale * codeword, codes) of FP32 `x`; the project's rounding primitive.

    Args:
      spec: the rounding.
      x: FP32 values.
      scale: FP32 block scales, broadcastable against x, positive (or NaN).
      hint, guard, obey: as in `round_codes`.

    Returns:
      FP32 values and uint8 codes of x's shape. A NaN or infinite x gives NaN: the
      codes cannot say so, and the scale may be the other side's. The gradient with
      respect to x is that of the values, unchanged (or zero where clipped, if
      asked); scale and hints get none.
    """
    codes = round_codes(spec, x, scale, hint, guard, obey)
    return jnp.where(jnp.isfinite(x), formats.decode_e2m1(codes) * scale, jnp.nan), codes


def _forward(spec, x, scale, hint, guard, obey):
    out = fp4_round(spec, x, scale, hint, guard, obey)
    return out, jnp.abs(x) <= formats.E2M1_MAX * scale if spec.clip_gradient else None


def _backward(spec, inside, cotangent):
    g = cotangent[0]
    return g if inside is None else jnp.where(inside, g, 0.0), None, None, None, None


fp4_round.defvjp(_forward, _backward)


@jax.custom_vjp
def straight_through(x: jax.Array, value: jax.Array) -> jax.Array:
    """`value`, with the gradient going to `x` (of its shape and dtype) unchanged.

    Differentiating x / outer * outer instead is an ulp off, and zero where the
    outer scale is so small that the gradient times it underflows.
    """
    return value


straight_through.defvjp(lambda x, value: (value, None), lambda _, g: (g, None))


def guided_round(
    x: jax.Array,
    block_scale: jax.Array,
    mantissa_bits: jax.Array,
    format: Format = NVFP4,
    *,
    guard: float | None = None,
) -> jax.Array:
    """TRACE's rounding: x on the rollout's grid, to the side its bit names.

    Implements section 2 of the method (arXiv 2610.07767) with one bit a value:
    z = clip(x / s, -6, 6) is bracketed by two E2M1 codewords, and the one whose
    mantissa bit equals the rollout's is taken. If z is a codeword it stays.

    Args:
      x: [..., n] floating point.
      block_scale: [..., ceil(n / block)] the rollout's scales as numbers, outer
        scale included. Positive.
      mantissa_bits: [..., n] integers 0 or 1.
      format: gives the block length.
      guard: obey a bit only within this many steps of the rounding midpoint.

    Returns:
      s * q in x's dtype; the gradient with respect to x is straight through.

    Raises:
      ValueError: shapes do not fit.
    """
    blocks = formats.num_blocks(x.shape[-1], format)
    if block_scale.shape != (*x.shape[:-1], blocks):
        raise ValueError(
            f"guided_round: x {x.shape} in blocks of {format.block} needs block_scale of shape "
            f"{(*x.shape[:-1], blocks)}, not {block_scale.shape}"
        )
    if mantissa_bits.shape != x.shape:
        raise ValueError(
            f"guided_round: mantissa_bits {mantissa_bits.shape} must match x {x.shape}"
        )
    u = formats.to_blocks(x.astype(jnp.float32), format)
    bits = formats.to_blocks(mantissa_bits.astype(jnp.uint8), format)
    scale = block_scale.astype(jnp.float32)[..., None]
    value, _ = fp4_round(Rounding("one_bit"), u, scale, bits, guard)
    return formats.from_blocks(value, x.shape[-1]).astype(x.dtype)
