"""Rows of K and V as E4M3: one byte a value, one power of two a row.

The protection beside FP4: twice the bytes of NVFP4, about a quarter of its error. Rows have no
block scales, so nothing of them can guide a trainer.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trace_jax.fp4 import formats
from trace_jax.fp4.rounding import straight_through


@dataclasses.dataclass(frozen=True)
class E4M3Rows:
    """The format of K and V beside `Format`; its one instance is FP8."""

    name: str = "fp8"


FP8 = E4M3Rows()


class Fp8Rows(NamedTuple):
    """Rows [..., width]: values in the source's dtype, codes uint8, exponents uint8 [..., 1]."""

    value: jax.Array
    codes: jax.Array
    exponent: jax.Array


def encode_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """E4M3 codes of rows x [..., width] and the exponent byte [..., 1] of each row's scale.

    The scale is the smallest power of two that brings the row within 448, at least 2**-117; x is
    taken as its own dtype holds it. By bits, so that every back end agrees: 448 is 1.75 x 2^8.
    A row with NaN or Inf has exponent 255.
    """
    x = formats.fp32_source(x)
    amax = formats.largest(x, keepdims=True)
    top = (jax.lax.bitcast_convert_type(amax, jnp.uint32) + jnp.uint32(0x1FFFFF)) >> 23
    exponent = jnp.maximum(top.astype(jnp.int32) - 8, 127 - 117).astype(jnp.uint32)
    size = jnp.abs(x) * jax.lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    bits = jax.lax.bitcast_convert_type(size, jnp.uint32)
    normal = ((bits + jnp.uint32(0x7FFFF) + (bits >> 20 & 1)) >> 20) - jnp.uint32(120 << 3)
    subnormal = jnp.round(size * 2.0**9).astype(jnp.uint32)
    byte = jnp.where(size < 2.0**-6, subnormal, normal).astype(jnp.uint8)
    byte |= jnp.signbit(x).astype(jnp.uint8) << 7
    finite = jnp.isfinite(amax)
    return jnp.where(finite, byte, 0x7F), jnp.where(finite, exponent, 255).astype(jnp.uint8)


def decode_fp8(codes: jax.Array, exponent: jax.Array) -> jax.Array:
    """FP32 rows [..., width]; exact in BF16, a code has four significant bits."""
    power = jax.lax.bitcast_convert_type(exponent.astype(jnp.uint32) << 23, jnp.float32)
    return formats.decode_e4m3(codes) * power


def quantize_fp8(x: jax.Array) -> Fp8Rows:
    """Rows x [..., width], rounded to BF16 first, with a straight-through gradient."""
    codes, exponent = encode_fp8(jax.lax.stop_gradient(x).astype(jnp.bfloat16))
    value = decode_fp8(codes, exponent).astype(x.dtype)
    return Fp8Rows(straight_through(x, value), codes, exponent)
