"""The Triton kernels' logic on CPU, interpreted, against the references; a program of its own.

Run by test_kernels_triton.py with TRITON_INTERPRET=1, which must be set before Triton is
imported. The interpreter takes no inline assembly: unpacking is replaced by plain code here,
and its assembly is checked by itself in the tests.
"""

import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton_helpers
from kernel_helpers import decode, relative_error
from triton import language as tl

from trace_jax.fp4 import MXFP4, NVFP4, quantize, unscaled
from trace_jax.kernels import expert_matmul as em
from trace_jax.kernels import fp4_triton, kv_append, kv_attention, triton_call
from trace_jax.kernels import kv_pages as kp
from trace_jax.kernels import quantize as rows_op
from trace_jax.kernels.bits import codes_of
from trace_jax.kernels.kv_recent import append_recent, new_recent


def unpack(words, scales):
    """`fp4_triton.unpack` by the codec's table of codes: see bits.codes_of."""
    data = np.ascontiguousarray(words.handle.data)
    scales = np.broadcast_to(scales.handle.data, data.shape).astype(np.uint32)
    codes = np.asarray(codes_of(jnp.asarray(data.view(np.uint32))))
    raw = (codes & 8).astype(np.uint16) << 12 | (codes & 7).astype(np.uint16) << 6
    scale = (scales & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    values = raw.view(ml_dtypes.bfloat16).astype(np.float32) * scale[..., None]
    bits = values.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    pairs = (bits[..., ::2] | bits[..., 1::2] << 16).view(np.int32)
    kind = tl.block_type(tl.int32, list(data.shape))
    return tuple(
        tl.tensor(type(words.handle)(pairs[..., i].copy(), tl.int32), kind) for i in range(4)
    )


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def spread(seed, count, width):
    """Rows with blocks of every size, ties, zeros, large and bad values."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, width // 16, 16)) * 2.0 ** rng.integers(
        -12, 12, (count, width // 16, 1)
    )
    x = x.reshape(count, width)
    ties = np.tile([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5, 6], width // 8)
    x[0], x[1], x[2], x[3] = 0, ties, -ties * 48, x[3] * 2.0**100
    x[4, ::2], x[5] = -0.0, ties * 2.0**-120
    x[6] = 1.75 * 2.0**9
    return jnp.asarray(x, jnp.bfloat16)


def check_quantize():
    for width in (16, 48, 768):
        x = spread(0, 37, width)
        same(rows_op.quantize_rows(x, version="triton"), rows_op.quantize_rows(x))
        assert rows_op.quantize_rows(x, bits=False, version="triton").bits is None
    bad = spread(0, 9, 64).at[5, 3].set(jnp.nan).at[7, 0].set(-jnp.inf)
    q = rows_op.quantize_rows(bad, version="triton").q
    assert np.isnan(q.outer).ravel().tolist() == [i in (5, 7) for i in range(9)]
    assert (np.asarray(q.block_scale)[[5, 7]] == 127).all()


def check_products():
    load, top_k, n, k = (1, 0, 40, 7), 2, 48, 192
    flat = np.repeat(np.arange(4), load)
    ids = np.random.default_rng(0).permutation(flat).reshape(-1, top_k).astype(np.int32)
    slot, expert = np.argsort(ids.reshape(-1), kind="stable"), np.sort(flat)
    routing = em.route(jnp.asarray(ids), 4, version="reference")
    size = jnp.exp2(jnp.arange(4.0) * 5 - 10)[:, None, None].astype(jnp.bfloat16)
    for kind in ("nvfp4", "mxfp4", "bf16"):
        gate, up = (normal(i, 4, n, k) * size for i in (1, 2))
        if kind == "nvfp4":
            gate, up = (quantize(w, NVFP4, outer_axes=(1, 2)) for w in (gate, up))
        elif kind == "mxfp4":
            gate, up = (quantize(w, MXFP4) for w in (gate, up))
        value = {
            "nvfp4": lambda w: decode(w),
            "mxfp4": lambda w: np.asarray(unscaled(w, jnp.float32), np.float64),
            "bf16": lambda w: np.asarray(w, np.float64),
        }[kind](gate)
        x = normal(3, ids.size, k)
        out = em.expert_matmul(x, em.lay_out(gate, layout="triton"), routing, version="triton")
        want = np.einsum("rk,rnk->rn", np.asarray(x, np.float64), value[expert])
        for got, row in zip(np.asarray(out)[slot], want, strict=True):
            assert relative_error(got, row) < 2e-6, kind
        check_gated(gate, up, routing, normal(4, ids.shape[0], k), n)


def check_gated(gate, up, routing, x, n):
    x_outer = jnp.exp2(jnp.arange(len(x), dtype=jnp.float32) % 5 - 8)
    biases = dict(bias=normal(5, 4, n), up_bias=normal(6, 4, n))
    for activation, extra in (("silu", {}), ("clamped_swiglu", biases)):
        laid = em.lay_out(gate, up, "triton", **extra)
        got, want = (
            em.expert_matmul(x, laid, routing, x_outer=x_outer, activation=activation, version=v)
            for v in ("triton", "reference")
        )
        # Sums in another order, then one rounding to BF16: now and then a neighbour.
        assert relative_error(got, want) < 5e-4, activation


def check_append():
    heads, d = 2, 64
    for kind in ("nvfp4", "fp8", "bf16"):
        pool = kp.new_pages(5, heads, d, kind, "triton")
        k, v = (spread(i, 5 * 64 * heads, d).reshape(5, 64, heads, d) for i in (0, 1))
        pool = kp.write_pages(pool, jnp.arange(5), k, v)
        table = jnp.array([[3, 0], [1, 2], [4, 4], [4, 4]])
        positions = jnp.array([-1, 64 + 37, 128, 5])
        rows = spread(2, 8, d).reshape(4, heads, d), spread(3, 8, d).reshape(4, heads, d)
        records = (None, 0, 1, 4) if kind == "nvfp4" else (None,)
        for record in records:
            arguments = (pool, table, positions, *rows)
            got = kv_append.append(*arguments, record=record, version="triton")
            same(got, kv_append.append(*arguments, record=record, version="reference"))
        changed = (np.asarray(got.pages.data) != np.asarray(pool.data)).any(axis=(1, 2, 3))
        assert changed.tolist() == [False, False, True, False, True]


def check_attention():
    batch, pages, heads = 4, 3, 2
    table = jax.random.permutation(jax.random.key(2), batch * pages).reshape(batch, pages)
    lengths = jnp.array([0, 1, 100, 192], jnp.int32)
    cases = [("nvfp4", 64, 5), ("nvfp4", 128, 8), ("fp8", 64, 20), ("bf16", 64, 1)]
    for kind, d, group in cases:
        k, v = (normal(i, batch * pages, 64, heads, d) for i in (0, 1))
        token = jnp.arange(pages * 64)[None] < lengths[:, None]
        used = jnp.zeros((batch * pages, 64), bool).at[table].set(token.reshape(4, pages, 64))
        k, v = (jnp.where(used[..., None, None], x, jnp.bfloat16(jnp.nan)) for x in (k, v))
        pool = kp.write_pages(
            kp.new_pages(batch * pages, heads, d, kind, "triton"), jnp.arange(batch * pages), k, v
        )
        q = normal(3, batch, heads * group, d)
        for window, sink in ((None, None), (70, jnp.arange(heads * group) / 3)):
            got, want = (
                kv_attention.paged_attention(
                    q, pool, table, lengths, scale=d**-0.5, window=window, sink=sink, version=v
                )
                for v in ("triton", "reference")
            )
            for one, row in zip(got[1:], want[1:], strict=True):
                assert relative_error(one, row) < 4.5e-3, (kind, window)
            assert not np.asarray(got[0]).any()


def check_recent():
    heads, d, window, steps = 2, 64, 64, 100
    starts = np.array([0, 40, 99])
    k, v = normal(0, 3, steps, heads, d), normal(1, 3, steps, heads, d)
    pool, recent = (
        kp.new_pages(6, heads, d, layout="triton"),
        new_recent(3, window, heads, d, "triton"),
    )
    table = jnp.arange(6).reshape(3, 2)
    reference = dict(version="reference")
    for t in range(steps):
        at = jnp.asarray(t - starts)
        pool = add(pool, table, at, k[:, t], v[:, t], **reference).pages
        recent = add_recent(recent, at, k[:, t], v[:, t], **reference)
    lengths, q = jnp.asarray(steps - starts, jnp.int32), normal(2, 3, 4, d)
    for low in (None, 20, 80):
        got, want = (
            kv_attention.paged_attention(
                q, pool, table, lengths, scale=0.125, window=low, recent=recent, version=v
            )
            for v in ("triton", "reference")
        )
        for one, row in zip(got, want, strict=True):
            assert relative_error(one, row) < 4.5e-3, low


add = jax.jit(kv_append.append, static_argnames="version")
add_recent = jax.jit(append_recent, static_argnames="version")


if __name__ == "__main__":
    triton_helpers.repair_interpreter()
    triton_call.call = triton_helpers.interpret
    triton_call.refusal = lambda: None
    fp4_triton.unpack = unpack
    for check in (check_quantize, check_products, check_append, check_attention, check_recent):
        start = time.time()
        check()
        print(
            f"interpreted and right: {check.__name__[6:]} in {time.time() - start:.0f} s",
            flush=True,
        )
