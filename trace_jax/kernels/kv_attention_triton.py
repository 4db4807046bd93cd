"""Paged decode attention in Triton, for NVIDIA GPUs from Ampere on.

Pages are rows as they come (layout "triton" of kv_units). A block of threads takes one
sequence, one KV head and a share of its pages; scores have K's tokens as rows, so that K is
decoded in registers as weights are (fp4_triton). The shares are merged by XLA.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from trace_jax.kernels import fp4_triton, triton_call
from trace_jax.kernels.kv_units import PAGE, unit_bytes

_TOKENS = tl.constexpr(PAGE)
_LOW = tl.constexpr(-1e30)
_BLOCKS = 1024  # blocks of threads to aim at: several a multiprocessor


@triton.jit
def _unit(unit, D: tl.constexpr, KIND: tl.constexpr):
    """BF16 [64, D] of a unit and the FP32 [64] powers that its rows lack.

    NVFP4: columns in the order of fp4_triton.permuted.
    """
    token = tl.arange(0, _TOKENS)
    row, column = token[:, None], tl.arange(0, D)[None, :]
    if KIND == "bf16":
        value = tl.load(unit.to(tl.pointer_type(tl.bfloat16)) + row * D + column)
        return value, tl.full((_TOKENS,), 1.0, tl.float32)
    if KIND == "fp8":
        byte = tl.load(unit + row * D + column).to(tl.uint16)
        raw = (((byte & 0x80) << 8) | ((byte & 0x7F) << 4)).to(tl.bfloat16, bitcast=True)
        exponent = tl.load(unit + _TOKENS * D + token)
        lift = tl.full((1, 1), 2.0**120, tl.float32).to(tl.bfloat16)
        return raw * lift, fp4_triton.power(exponent.to(tl.int32))
    words = unit.to(tl.pointer_type(tl.int32)) + row * (D // 8) + tl.arange(0, D // 8)[None, :]
    words = tl.load(words)
    unit += _TOKENS * (D // 2)
    e5m3 = tl.load(unit + row * (D // 16) + tl.arange(0, D // 16)[None, :])
    exponent = tl.load(unit + _TOKENS * (D // 16) + token).to(tl.int32)
    return fp4_triton.operand(words, e5m3, _TOKENS, D), fp4_triton.power(exponent) * fp4_triton.LIFT


@triton.jit
def attention(
    q, data, table, lengths, acc_out, top_out, total_out,
    SCALE: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    PAGES: tl.constexpr, SHARES: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr,
    WINDOW: tl.constexpr, HIDDEN: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """One share of a (sequence, KV head): sums over its tokens, their total and maximum.

    HIDDEN: last tokens to leave out. RING: the pages are a window of so many last tokens.
    """
    b, h, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + b)
    low = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    high = length - HIDDEN
    first, end = (0, PAGES) if RING else (low // _TOKENS, (high + _TOKENS - 1) // _TOKENS)
    each = (tl.maximum(end - first, 0) + SHARES - 1) // SHARES
    first = first + share * each
    end = tl.minimum(first + each, end)
    head, column = tl.arange(0, G), tl.arange(0, D)
    place = (b * HEADS + h).to(tl.int64)
    queries = tl.trans(tl.load(q + (place * G + head[:, None]) * D + column[None, :]))
    top = tl.full((G,), _LOW, tl.float32)
    total = tl.zeros((G,), tl.float32)
    acc = tl.zeros((G, D), tl.float32)
    for page in tl.range(first, end):
        unit = tl.load(table + b * PAGES + page).to(tl.int64)
        unit = data + (unit * HEADS + h) * (2 * UNIT)
        token = page * _TOKENS + tl.arange(0, _TOKENS)
        if RING:
            # Slots not yet filled get a number outside, whatever sign % has.
            token = length - 1 - (length - 1 - token) % RING
        live = (token >= low) & (token < high)
        key, power = _unit(unit, D, KIND)
        score = tl.dot(key, queries) * (power * SCALE)[:, None]
        score = tl.where(live[:, None], score, _LOW)
        above = tl.maximum(top, tl.max(score, 0))
        weight = tl.where(live[:, None], tl.exp(score - above[None, :]), 0.0)
        fade = tl.exp(top - above)
        top, total = above, total * fade + tl.sum(weight, 0)
        value, power = _unit(unit + UNIT, D, KIND)
        if KIND == "bf16":  # quantized rows are finite: their powers alone can be bad
            zero = tl.zeros((1, 1), tl.float32).to(tl.bfloat16)
            value = tl.where(live[:, None], value, zero)
        weight = tl.where(live[:, None], weight * power[:, None], 0.0).to(tl.bfloat16)
        acc = tl.dot(tl.trans(weight), value, acc * fade[:, None])
    place = (place * SHARES + share) * G + head
    tl.store(acc_out + place[:, None] * D + column[None, :], acc)
    tl.store(top_out + place, top)
    tl.store(total_out + place, total)


def _parts(q, pages, table, lengths, scale, shares, window=0, hidden=0, ring=0):
    """Sums [batch, heads, shares, G, D], maxima and totals [.., G] of q [batch, heads, G, D]."""
    batch, heads, group, d = q.shape
    lead = (batch, heads, shares, group)
    out = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*lead, d), lead, lead)]
    # Consumer GPUs have 99 KB of shared memory a block, too little for two stages of these.
    large = pages.kind == "bf16" and d == 256
    return triton_call.call(
        attention, (batch, heads, shares), q, pages.data, table, lengths, out=out,
        warps=8 if d == 256 else 4, stages=1 if large else 3,
        SCALE=scale, HEADS=heads, G=group, D=d, PAGES=table.shape[1], SHARES=shares,
        UNIT=unit_bytes(d, pages.kind), KIND=pages.kind, WINDOW=window, HIDDEN=hidden, RING=ring,
    )  # fmt: skip


def _grouped(q, heads: int, kind: str):
    """Queries [batch, heads, G, D] as pages of a kind want them, G padded to 16 or more."""
    batch, q_heads, d = q.shape
    group = q_heads // heads
    padded = max(16, triton.next_power_of_2(group))
    q = jnp.pad(q.reshape(batch, heads, group, d), [(0, 0)] * 2 + [(0, padded - group), (0, 0)])
    return fp4_triton.permuted(q) if kind == "nvfp4" else q


def paged_attention(q, pages, table, lengths, scale, window, sink, recent, ring_table):
    """The contract of kv_attention.paged_attention; pages in the layout "triton".

    `ring_table`: the pages of each sequence's window of recent tokens, if there is one.
    """
    batch, q_heads, d = q.shape
    heads = pages.kv_heads
    shares = max(1, min(_BLOCKS // (batch * heads), table.shape[1]))
    last = 0 if recent is None else ring_table.shape[1] * PAGE
    common = dict(scale=float(scale), window=window or 0)
    queries = _grouped(q, heads, pages.kind)
    parts = _parts(queries, pages, table, lengths, shares=shares, hidden=last, **common)
    if pages.kind == "nvfp4":  # its columns of V are permuted
        parts[0] = fp4_triton.restored(parts[0])
    if recent is not None:
        queries = _grouped(q, heads, recent.kind)
        new = _parts(queries, recent, ring_table, lengths, shares=1, ring=last, **common)
        parts = [jnp.concatenate(both, axis=2) for both in zip(parts, new, strict=True)]
    return _merged(parts, q_heads // heads, lengths, sink).reshape(batch, q_heads, d)


def _merged(parts, group: int, lengths, sink):
    """BF16 [batch, heads, group, D] of the shares' parts and the sinks."""
    acc, top, total = (p[:, :, :, :group] for p in parts)
    best = jnp.max(top, axis=2)
    if sink is not None:
        sink = sink.astype(jnp.float32).reshape(1, -1, group)
        best = jnp.maximum(best, sink)
    weight = jnp.exp(top - best[:, :, None])
    total = jnp.sum(total * weight, axis=2)
    total = total if sink is None else total + jnp.exp(sink - best)
    value = jnp.sum(acc * weight[..., None], axis=2) / total[..., None]
    return jnp.where((lengths > 0)[:, None, None, None], value, 0.0).astype(jnp.bfloat16)
