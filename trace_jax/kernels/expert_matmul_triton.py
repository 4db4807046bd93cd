"""Routed products in Triton, for NVIDIA GPUs from Ampere on.

Layout: codes as interlocked words, uint8 [experts, parts, N, K/2], and E5M3 scales
[experts, parts, N, K/16], rows of K as they come, K padded to a multiple of 64; or BF16 bytes
[experts, parts, N, 2 K]. parts = gate and up, or one. A block of threads takes 64 or 128
outputs of one expert and a tile of its rows: weights are the left operand of the tensor cores,
decoded in registers, and x is permuted along K to fit what a lane holds (fp4_triton.permuted).
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from trace_jax.kernels import fp4_triton, triton_call

_ROWS = (16, 32, 64)  # rows a tile may have


@triton.jit
def _weights(data, scales, n, k0, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             FP4: tl.constexpr):  # fmt: skip
    """BF16 [BN, BK] of rows n from k0 on; FP4 ones / 512."""
    if FP4:
        word = k0 // 8 + tl.arange(0, BK // 8)
        group = k0 // 16 + tl.arange(0, BK // 16)
        words = tl.load(data.to(tl.pointer_type(tl.int32)) + n[:, None] * (K // 8) + word[None, :])
        e5m3 = tl.load(scales + n[:, None] * (K // 16) + group[None, :])
        return fp4_triton.operand(words, e5m3, BN, BK)
    k = k0 + tl.arange(0, BK)
    return tl.load(data.to(tl.pointer_type(tl.bfloat16)) + n[:, None] * K + k[None, :])


@triton.jit
def _finish(acc, part: tl.constexpr, e, n, x_scale, outer, bias, N: tl.constexpr,
            PARTS: tl.constexpr, FP4: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Sums times outer scales, plus biases."""
    if FP4:
        acc *= fp4_triton.LIFT
    acc = acc * x_scale[None, :] * tl.load(outer + 2 * e + part)
    if BIAS:
        acc += tl.load(bias + (e * PARTS + part) * N + n)[:, None]
    return acc


@triton.jit
def _activate(gate, up, CLAMPED: tl.constexpr):
    if CLAMPED:
        keep: tl.constexpr = tl.PropagateNan.ALL
        gate = tl.minimum(gate, 7.0, propagate_nan=keep)
        up = tl.maximum(tl.minimum(up, 7.0, propagate_nan=keep), -7.0, propagate_nan=keep)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def product(
    x, data, scales, outer, bias, x_outer, slot, offset, tile_expert, tile_row, out,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    FP4: tl.constexpr, BIAS: tl.constexpr, X_OUTER: tl.constexpr, CLAMPED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of rows times BN outputs of its expert (of gate and of up)."""
    e = tl.load(tile_expert + tl.program_id(0))
    if e < 0:
        return
    row, last = tl.load(tile_row + tl.program_id(0)), tl.load(offset + e + 1)
    m = row + tl.arange(0, BM)
    live = m < last
    m = tl.minimum(m, last - 1)  # rows past the expert's last repeat it and are not stored
    place = tl.load(slot + m)
    source = place // TOP_K if GATED else m
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    keep = n < N
    n = tl.minimum(n, N - 1)
    PARTS: tl.constexpr = 2 if GATED else 1
    BYTES: tl.constexpr = K // 2 if FP4 else K * 2
    data += e.to(tl.int64) * (PARTS * N * BYTES)
    scales += e.to(tl.int64) * (PARTS * N * (K // 16))
    acc = tl.zeros((BN, BM), tl.float32)
    acc_up = tl.zeros((BN, BM), tl.float32)
    x += source[:, None].to(tl.int64) * K + tl.arange(0, BK)[None, :]
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        tokens = tl.trans(tl.load(x + k0))
        acc = tl.dot(_weights(data, scales, n, k0, K, BN, BK, FP4), tokens, acc)
        if GATED:
            up = _weights(data + N * BYTES, scales + N * (K // 16), n, k0, K, BN, BK, FP4)
            acc_up = tl.dot(up, tokens, acc_up)
    x_scale = tl.load(x_outer + source) if X_OUTER else tl.full((BM,), 1.0, tl.float32)
    result = _finish(acc, 0, e, n, x_scale, outer, bias, N, PARTS, FP4, BIAS)
    if GATED:
        up = _finish(acc_up, 1, e, n, x_scale, outer, bias, N, PARTS, FP4, BIAS)
        result = _activate(result, up, CLAMPED)
    where = (m if GATED else place).to(tl.int64)
    at = out + where[:, None] * N + n[None, :]
    result = tl.trans(result).to(out.dtype.element_ty)
    tl.store(at, result, mask=live[:, None] & keep[None, :])


def _tiles(offset: jax.Array, rows: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """Expert (-1: none) and first row of every tile: int32, as many as there may be."""
    experts = offset.shape[0] - 1
    count = -(-jnp.diff(offset) // tile)
    ends = jnp.cumsum(count)
    index = jnp.arange(rows // tile + min(experts, rows), dtype=jnp.int32)
    expert = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    first = offset[expert] + (index - (ends - count)[expert]) * tile
    return jnp.where(index < ends[-1], expert, -1), first.astype(jnp.int32)


def rows_of_tile(rows_per_expert: float) -> int:
    """Rows a tile for so many rows an expert on average."""
    return next((r for r in _ROWS if rows_per_expert <= r), _ROWS[-1])


def expert_matmul(x, weights, routing, x_outer, activation):
    """The contract of expert_matmul.expert_matmul; weights in the layout "triton"."""
    rows, experts = routing.slot.shape[0], weights.data.shape[0]
    n, k = weights.outputs, weights.data.shape[-1] * 2
    if not weights.quantized:
        k //= 4
    x = jnp.pad(x, [(0, 0), (0, k - x.shape[1])])
    x = fp4_triton.permuted(x) if weights.quantized else x
    tile = rows_of_tile(rows / experts)
    expert, first = _tiles(routing.offset, rows, tile)
    outputs = 64 if weights.gated or tile == 64 else 128
    step = (128 if k % 128 == 0 else 64) if weights.quantized else 64
    dummy = weights.outer  # for pointers that are not read
    dtype = jnp.bfloat16 if weights.gated else jnp.float32
    return triton_call.call(
        product, (expert.shape[0], -(-n // outputs), 1),
        x, weights.data, dummy if weights.scales is None else weights.scales, weights.outer,
        dummy if weights.bias is None else weights.bias, dummy if x_outer is None else x_outer,
        routing.slot, routing.offset, expert, first,
        out=[jax.ShapeDtypeStruct((rows, n), dtype)],
        N=n, K=k, TOP_K=rows // x.shape[0], GATED=weights.gated, FP4=weights.quantized,
        BIAS=weights.bias is not None, X_OUTER=x_outer is not None,
        CLAMPED=activation == "clamped_swiglu", BM=tile, BN=outputs, BK=step, STAGES=3,
    )[0]  # fmt: skip
