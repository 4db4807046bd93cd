"""Bytes of a KV unit: 64 tokens of K, or of V, of one head, as the lanes of a warp read them.

Kinds, and the fields of a token's row of D values:
  "nvfp4": codes (4 bits), block scales (E4M3, kept as E5M3), the row's power-of-two exponent;
  "fp8": E4M3 codes, the row's power-of-two exponent;
  "bf16": the values.
Here fields are token-major, [..., 64, n]. A unit holds them one after the other, each in an
order of its own (`_ORDERS`), so only this file and the CUDA sources know where a token is.
"""

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.fp4 import formats
from trace_jax.fp4.formats import NVFP4
from trace_jax.fp4.fp8 import decode_fp8, encode_fp8
from trace_jax.fp4.qtensor import quantize
from trace_jax.kernels.bits import codes_of, from_e5m3, interlock, to_e5m3

PAGE = 64
KINDS = ("nvfp4", "fp8", "bf16")
KV_FORMAT = NVFP4.replace(name="nvfp4_kv", outer="pow2")

Fields = tuple[jax.Array, ...]


def unit_bytes(head_size: int, kind: str) -> int:
    """Bytes of 64 tokens of K or of V of one head."""
    d = head_size
    return {"nvfp4": 36 * d + PAGE, "fp8": 64 * d + PAGE, "bf16": 128 * d}[kind]


# --- values to fields and back -----------------------------------------------------------------


def encode(x: jax.Array, kind: str) -> Fields:
    """Fields of BF16 rows x [..., D]. A row with NaN or Inf has exponent 255."""
    if kind == "bf16":
        return (x,)
    if kind == "fp8":
        return encode_fp8(x)
    q = quantize(x, KV_FORMAT, outer_axes=(x.ndim - 1,))
    exponent = jax.lax.bitcast_convert_type(q.outer, jnp.uint32) >> 23
    return q.codes, q.block_scale, exponent.astype(jnp.uint8)


def decode(fields: Fields, kind: str) -> jax.Array:
    """FP32 rows [..., D]."""
    if kind == "bf16":
        return fields[0].astype(jnp.float32)
    if kind == "fp8":
        return decode_fp8(*fields)
    power = jax.lax.bitcast_convert_type(fields[-1].astype(jnp.uint32) << 23, jnp.float32)
    value = formats.decode_e2m1(formats.to_blocks(fields[0], KV_FORMAT))
    value = value * formats.decode_scale(fields[1], KV_FORMAT)[..., None]
    return formats.from_blocks(value, fields[0].shape[-1]) * power


# --- fields to bytes and back ------------------------------------------------------------------

# Field -> for K and for V: how a token-major [64, n] splits, and the order of the parts in a
# unit. -1 takes what D leaves. The 64 tokens of K split as (i, half, g), of V as
# (j, half, t, low or high): what the tensor cores' rows and columns are to a lane.
_ORDERS = {
    "codes": (
        ((4, 2, 8, -1, 4, 2, 8), (0, 3, 2, 4, 1, 5, 6)),
        ((4, 2, 4, 2, -1, 2, 8), (4, 2, 6, 5, 0, 1, 3)),
    ),
    "scales": (((4, 2, 8, -1, 4), (0, 3, 2, 4, 1)), ((4, 2, 4, 2, -1), (2, 4, 0, 1, 3))),
    "exponents": (((4, 2, 8), (2, 0, 1)), ((4, 2, 8), (2, 0, 1))),
    "fp8": (
        ((4, 2, 8, -1, 4, 2, 2, 2, 2), (0, 3, 5, 2, 4, 6, 7, 1, 8)),
        ((2, 2, 2, 4, 2, -1, 2, 8), (5, 0, 3, 7, 1, 2, 6, 4)),
    ),
    "bf16": (
        ((4, 2, 8, -1, 4, 4, 2, 2), (0, 3, 5, 2, 4, 6, 1, 7)),
        ((4, 2, 4, 2, -1, 2, 8), (4, 0, 2, 6, 1, 5, 3)),
    ),
}
_FIELDS = {"nvfp4": ("codes", "scales", "exponents"), "fp8": ("fp8", "exponents"),
           "bf16": ("bf16",)}  # fmt: skip

# The values of V come in groups of 32 chunks of 16 bytes, one a lane: (t, g), so that a token's
# are neighbours; g is turned by 2 t, so that lanes that read together use different banks.
_CHUNK = {"codes": 32, "fp8": 16, "bf16": 8}  # values
_TURN = np.array([t * 8 + (s - 2 * t) % 8 for t in range(4) for s in range(8)])


def _width(field: str, head_size: int) -> int:
    return {"scales": head_size // 16, "exponents": 1}.get(field, head_size)


def _bytes(field: str, x: jax.Array) -> jax.Array:
    """A field's values in a unit's order, [units, n], as bytes."""
    if field == "codes":
        words = interlock(formats.pack(x.reshape(x.shape[0], -1, 8)))
        return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(x.shape[0], -1)
    if field == "bf16":
        return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], -1)
    return to_e5m3(x) if field == "scales" else x


def _values(field: str, data: jax.Array) -> jax.Array:
    """Inverse of `_bytes`."""
    if field == "codes":
        words = jax.lax.bitcast_convert_type(data.reshape(data.shape[0], -1, 4), jnp.uint32)
        return codes_of(words)
    if field == "bf16":
        return jax.lax.bitcast_convert_type(data.reshape(data.shape[0], -1, 2), jnp.bfloat16)
    return from_e5m3(data) if field == "scales" else data


def lay_out(fields: Fields, kind: str, is_v: int) -> jax.Array:
    """Fields [..., 64, n] to units uint8 [..., bytes]."""
    lead, parts = fields[0].shape[:-2], []
    for field, x in zip(_FIELDS[kind], fields, strict=True):
        shape, order = _ORDERS[field][is_v]
        x = x.reshape(-1, PAGE, x.shape[-1])
        x = x.reshape(-1, *_filled(shape, PAGE * x.shape[-1])).transpose(0, *(i + 1 for i in order))
        x = _turned(x.reshape(x.shape[0], -1), field, is_v, _TURN)
        parts.append(_bytes(field, x))
    return jnp.concatenate(parts, axis=-1).reshape(*lead, -1)


def fields_of(unit: jax.Array, kind: str, head_size: int, is_v: int) -> Fields:
    """Inverse of `lay_out`."""
    lead, at, fields = unit.shape[:-1], 0, []
    unit = unit.reshape(-1, unit.shape[-1])
    for field in _FIELDS[kind]:
        count = PAGE * _width(field, head_size)
        size = {"codes": count // 2, "bf16": 2 * count}.get(field, count)
        shape, order = _ORDERS[field][is_v]
        shape = _filled(shape, count)
        x = _values(field, unit[:, at : at + size]).reshape(unit.shape[0], -1)
        x = _turned(x, field, is_v, np.argsort(_TURN)).reshape(-1, *(shape[i] for i in order))
        x = x.transpose(0, *(i + 1 for i in np.argsort(order)))
        fields.append(x.reshape(*lead, PAGE, -1))
        at += size
    return tuple(fields)


def _turned(x: jax.Array, field: str, is_v: int, turn: np.ndarray) -> jax.Array:
    if not is_v or field not in _CHUNK:
        return x
    return x.reshape(x.shape[0], -1, 32, _CHUNK[field])[:, :, turn].reshape(x.shape)


def _filled(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    known = -int(np.prod(shape)) if -1 in shape else None
    return tuple(count // known if n == -1 else n for n in shape)
