"""FP4 in Pallas TPU kernels: byte rows and block scales to operands of the matrix unit.

A byte holds two neighbours along sublanes, the first in its low nibble; a block scale (E5M3) is
a row that is broadcast over the 8 byte rows below it. TPU v7 reads the bytes as float4 and gives
one operand with rows in order; earlier generations unpack nibbles, and give the even and the odd
rows as two operands.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from trace_jax.kernels import dispatch


def float4_here() -> bool:
    """Whether the chip converts float4: TPU v7 does."""
    return str(getattr(dispatch.device(), "device_kind", "")).startswith("TPU7")


def scale_values(e5m3: jax.Array) -> jax.Array:
    """FP32 values of E5M3 bytes."""
    bits = (e5m3.astype(jnp.int32) + ((127 - 10) << 3)) << 20
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _nibbles(byte: jax.Array, high: int) -> jax.Array:
    code = (byte >> 4) & 15 if high else byte & 15
    x = jax.lax.bitcast_convert_type(((code & 7) << 22) + 0x3F000000, jnp.float32)
    magnitude = jnp.minimum(x, 2 * x - 1)  # no subnormal on the way
    return jnp.where(code >= 8, -magnitude, magnitude)


def decode(packed: jax.Array, scale: jax.Array, float4: bool) -> tuple[jax.Array, ...]:
    """FP32 of bytes [K/2, n] and scales FP32 [K/16, n]: ([K, n],), or even and odd [K/2, n]."""
    if float4:
        values = (pltpu.bitcast(packed, jnp.float4_e2m1fn).astype(jnp.float32),)
    else:
        byte = packed.astype(jnp.int32)
        values = (_nibbles(byte, 0), _nibbles(byte, 1))
    groups = scale.shape[0]
    return tuple(
        (v.reshape(groups, -1, v.shape[-1]) * scale[:, None]).reshape(v.shape) for v in values
    )


def split(x: jax.Array, float4: bool) -> jax.Array:
    """Columns [..., K] as the operands' rows stand: in order, or even ones and then odd ones."""
    if float4:
        return x
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)


def unsplit(x: jax.Array, float4: bool) -> jax.Array:
    """Inverse of `split`."""
    if float4:
        return x
    return x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)
