"""Bytes of a KV unit in the layout "triton": the rows of its 64 tokens as they come.

A unit holds a kind's fields one after the other, each token-major: NVFP4 codes as interlocked
words, E5M3 scales and exponents; E4M3 codes and exponents; or BF16 values. See kv_units for
the kinds.
"""

import jax
import jax.numpy as jnp

from trace_jax.fp4 import formats
from trace_jax.kernels.bits import codes_of, from_e5m3, interlock, to_e5m3
from trace_jax.kernels.kv_units import PAGE, Fields


def lay_out(fields: Fields, kind: str) -> jax.Array:
    """Fields [..., 64, n] to units uint8 [..., bytes]."""
    lead = fields[0].shape[:-2]
    if kind == "nvfp4":
        codes, scales, exponents = fields
        words = interlock(formats.pack(codes.reshape(*codes.shape[:-1], -1, 8)))
        fields = (jax.lax.bitcast_convert_type(words, jnp.uint8), to_e5m3(scales), exponents)
    elif kind == "bf16":
        fields = (jax.lax.bitcast_convert_type(fields[0], jnp.uint8),)
    return jnp.concatenate([x.reshape(*lead, -1) for x in fields], axis=-1)


def fields_of(unit: jax.Array, kind: str, head_size: int) -> Fields:
    """Inverse of `lay_out`."""
    d, lead = head_size, unit.shape[:-1]
    if kind == "bf16":
        return (jax.lax.bitcast_convert_type(unit.reshape(*lead, PAGE, d, 2), jnp.bfloat16),)
    widths = {"nvfp4": (d // 2, d // 16, 1), "fp8": (d, 1)}[kind]
    parts, at = [], 0
    for width in widths:
        parts.append(unit[..., at : at + PAGE * width].reshape(*lead, PAGE, width))
        at += PAGE * width
    if kind == "fp8":
        return tuple(parts)
    words = jax.lax.bitcast_convert_type(parts[0].reshape(*lead, PAGE, d // 8, 4), jnp.uint32)
    return codes_of(words).reshape(*lead, PAGE, d), from_e5m3(parts[1]), parts[2]
