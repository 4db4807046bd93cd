"""The Triton versions, as JAX runs them: part of `python -m benchmarks.kernels`."""

from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.kernel_timing import (
    EXPERTS,
    FF,
    GROUP,
    HEAD,
    HIDDEN,
    KV_HEADS,
    TOP_K,
    routing,
    row,
    time_calls,
)
from trace_jax.kernels import expert_matmul as em
from trace_jax.kernels import kv_attention, kv_pages, kv_units, triton_call
from trace_jax.kernels.quantize import quantize_rows

TOKENS = (16, 64, 256)


def time_triton(copy: float) -> list[dict]:
    """The versions for other NVIDIA GPUs, as JAX runs them: small XLA kernels included."""
    if reason := triton_call.refusal():
        print(f"triton: not timed: {reason}")
        return []
    rows = []
    draw = jax.jit(_weights, static_argnums=(0, 1))
    for quantized in (False, True):
        for gated in (True, False):
            weights = [draw(quantized, gated, i) for i in range(3)]
            rows += [_product(copy, weights, tokens) for tokens in TOKENS]
            del weights
    for kind in ("bf16", "nvfp4"):
        rows.append(_attention(copy, kind))
    return [*rows, _quantize(copy)]


def _row(op, case, tokens, us, byte_count, copy) -> dict:
    return row(f"{op} (Triton)", case, tokens, us, byte_count, copy, "", "triton")


def _weights(quantized: bool, gated: bool, seed) -> em.ExpertWeights:
    parts, n, k = (2, FF, HIDDEN) if gated else (1, HIDDEN, FF)
    keys, outer = jax.random.split(jax.random.key(seed)), jnp.ones((EXPERTS, 2), jnp.float32)
    if not quantized:
        values = jax.random.normal(keys[0], (EXPERTS, parts, n, k), jnp.bfloat16)
        data = jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(EXPERTS, parts, n, 2 * k)
        return em.ExpertWeights(data, outer, False, gated, k, layout="triton")
    data = jax.random.bits(keys[0], (EXPERTS, parts, n, k // 2), jnp.uint8)
    scales = 64 + (jax.random.bits(keys[1], (EXPERTS, parts, n, k // 16), jnp.uint8) & 15)
    return em.ExpertWeights(data, outer, True, gated, k, scales, "triton")


def _product(copy, weights, tokens) -> dict:
    w, r = weights[0], routing(tokens)
    x = jax.random.normal(
        jax.random.key(1), (tokens if w.gated else tokens * TOP_K, w.k), jnp.bfloat16
    )
    call = partial(em.expert_matmul, activation="silu" if w.gated else None, version="triton")
    us = time_calls(lambda w: call(x, w, r), weights, 4)
    active = int((jnp.diff(r.offset) > 0).sum())
    byte_count = active * sum(a.nbytes for a in (w.data, w.scales) if a is not None) // EXPERTS
    byte_count += x.nbytes + tokens * TOP_K * w.outputs * (2 if w.gated else 4)
    op = "expert_matmul " + ("gate+up" if w.gated else "down")
    case = f"{'nvfp4' if w.quantized else 'bf16'}, {active} experts hit"
    return _row(op, case, tokens, us, byte_count, copy)


def _attention(copy, kind, batch=64, context=8192) -> dict:
    max_pages = context // kv_units.PAGE
    pools = [
        kv_pages.KVPages(_pages(kind, batch * max_pages, seed), HEAD, kind, layout="triton")
        for seed in range(2)
    ]
    table = jax.random.permutation(jax.random.key(2), batch * max_pages).astype(jnp.int32)
    table, lengths = table.reshape(batch, max_pages), jnp.full(batch, context, jnp.int32)
    q = jax.random.normal(jax.random.key(3), (batch, KV_HEADS * GROUP, HEAD), jnp.bfloat16)
    call = partial(kv_attention.paged_attention, scale=HEAD**-0.5, version="triton")
    us = time_calls(lambda pool: call(q, pool, table, lengths), pools, 4)
    case, byte_count = f"{kind} pages, {batch} x {context}", pools[0].data.nbytes + 2 * q.nbytes
    return _row("paged_attention", case, batch, us, byte_count, copy)


@partial(jax.jit, static_argnums=(0, 1))
def _pages(kind: str, pages: int, seed) -> jax.Array:
    """One page of random rows in the layout's own form, so often."""
    pool = kv_pages.new_pages(1, KV_HEADS, HEAD, kind, "triton")
    shape = (2, 1, kv_units.PAGE, KV_HEADS, HEAD)
    k, v = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    page = kv_pages.write_pages(pool, jnp.zeros(1, jnp.int32), k, v).data
    return jnp.broadcast_to(page, (pages, *page.shape[1:])) + jnp.uint8(0)


def _quantize(copy, count=131072) -> dict:
    xs = [jax.random.normal(jax.random.key(i), (count, HIDDEN), jnp.bfloat16) for i in range(2)]
    out = jax.eval_shape(partial(quantize_rows, version="triton"), xs[0])
    byte_count = xs[0].nbytes + sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(out))
    us = time_calls(partial(quantize_rows, version="triton"), xs, 2)
    case = f"nvfp4 and bits, width {HIDDEN}"
    return _row("quantize", case, count, us, byte_count, copy)
