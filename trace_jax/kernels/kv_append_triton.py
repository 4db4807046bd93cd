"""Append in Triton: K and V of one token a sequence and head into its page, in place."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from trace_jax.kernels import fp4_triton, triton_call
from trace_jax.kernels.kv_units import PAGE, unit_bytes

_TOKENS = tl.constexpr(PAGE)


@triton.jit
def _words(code, D: tl.constexpr):
    """Codes int32 [D] to interlocked words uint32 [D / 8]; see bits.interlock."""
    place = tl.arange(0, 8)
    pair = place // 2
    early = (((code & 8) << 12) | ((code & 7) << 6)).to(tl.uint32)
    late = (((code & 12) << 11) | ((code & 3) << 10)).to(tl.uint32)
    early, late = tl.reshape(early, (D // 8, 8)), tl.reshape(late, (D // 8, 8))
    bits = tl.where(pair[None, :] < 3, early >> (3 * pair).to(tl.uint32)[None, :], late)
    return tl.sum(bits << (16 * (place % 2)).to(tl.uint32)[None, :], axis=1)


@triton.jit
def _store_fp8(value, unit, token, D: tl.constexpr):
    """E4M3 codes over the smallest power of two that brings the row within 448."""
    top = tl.max(fp4_triton.magnitude_bits(value), 0)
    exponent = tl.maximum(((top + 0x1FFFFF) >> 23) - 8, 127 - 117)
    bad = top >= 0x7F800000
    exponent = tl.where(bad, 255, exponent)
    size = tl.abs(value) * ((254 - tl.minimum(exponent, 253)) << 23).to(tl.float32, bitcast=True)
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    byte = tl.where(bad, 0x7F, fp4_triton.encode_e4m3(size) | sign)
    tl.store(unit + token * D + tl.arange(0, D), byte.to(tl.uint8))
    tl.store(unit + _TOKENS * D + token, exponent.to(tl.uint8))


@triton.jit
def _row(
    x, unit, token, stored, bits, scales, row, D: tl.constexpr, KIND: tl.constexpr,
    RECORD: tl.constexpr,
):  # fmt: skip
    """One row of D values into its unit, if `stored`, and its record."""
    at = tl.arange(0, D)
    given = tl.load(x + row * D + at)
    value = given.to(tl.float32)
    if KIND == "bf16":
        if stored:
            tl.store(unit.to(tl.pointer_type(tl.bfloat16)) + token * D + at, given)
    elif KIND == "fp8":
        if stored:
            _store_fp8(value, unit, token, D)
    else:
        exponent = fp4_triton.row_exponent(tl.max(fp4_triton.magnitude_bits(value), 0))
        blocks = tl.reshape(value, (D // 16, 16))
        code, scale = fp4_triton.encode_blocks(blocks, tl.full((1, 1), 0, tl.int32) + exponent)
        code, block = tl.reshape(code, (D,)), tl.arange(0, D // 16)
        value = fp4_triton.decode_e4m3(scale).to(tl.int32, bitcast=True)
        e5m3 = tl.reshape((value >> 20) - ((127 - 10) << 3), (D // 16,))
        if stored:
            words = (unit + token * (D // 2)).to(tl.pointer_type(tl.uint32))
            tl.store(words + tl.arange(0, D // 8), _words(code, D))
            unit += _TOKENS * (D // 2)
            tl.store(unit + token * (D // 16) + block, e5m3.to(tl.uint8))
            tl.store(unit + _TOKENS * (D // 16) + token, exponent.to(tl.uint8))
        if RECORD >= 0:
            scale = tl.reshape(scale, (D // 16,)).to(tl.uint8)
            tl.store(scales + row * (D // 16) + block, scale)
        if RECORD > 0:
            kept = tl.reshape(fp4_triton.packed(tl.reshape(code, (1, D)), 1, D, RECORD),
                              (D * RECORD // 8,))  # fmt: skip
            tl.store(bits + row * (D * RECORD // 8) + tl.arange(0, D * RECORD // 8), kept)


@triton.jit
def append(
    before, table, positions, k, v, data, k_bits, k_scales, v_bits, v_scales,
    HEADS: tl.constexpr, D: tl.constexpr, PAGES: tl.constexpr, UNIT: tl.constexpr,
    KIND: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """One sequence and head. `data` is `before`: the pool is changed in place."""
    b, h = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + b)
    stored = (position >= 0) & (position < PAGES * _TOKENS)
    page = tl.load(table + b * PAGES + tl.where(stored, position, 0) // _TOKENS)
    unit = data + (page.to(tl.int64) * HEADS + h) * (2 * UNIT)
    token = position % _TOKENS
    row = b * HEADS + h
    _row(k, unit, token, stored, k_bits, k_scales, row, D, KIND, RECORD)
    _row(v, unit + UNIT, token, stored, v_bits, v_scales, row, D, KIND, RECORD)


def store(pages, table, positions, k, v, record: int | None) -> tuple[jax.Array, ...]:
    """The pool's data, then bits and scales of K's and of V's rows (meaningless if not asked)."""
    batch, heads, d = k.shape
    lead = (batch, heads)
    bits = jax.ShapeDtypeStruct((*lead, record * d // 8 if record else 1), jnp.uint8)
    scales = jax.ShapeDtypeStruct((*lead, 1 if record is None else d // 16), jnp.uint8)
    pool = jax.ShapeDtypeStruct(pages.data.shape, jnp.uint8)
    return triton_call.call(
        append, (batch, heads, 1), pages.data, table, positions, k, v,
        out=[pool, bits, scales, bits, scales], warps=1, aliases={0: 0},
        HEADS=heads, D=d, PAGES=table.shape[1], UNIT=unit_bytes(d, pages.kind), KIND=pages.kind,
        RECORD=-1 if record is None else record,
    )  # fmt: skip
