"""A BF16 window of the most recent tokens beside quantized pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import ON_GPU, TRITON, layout_of, relative_error, versions

from trace_jax.kernels import kv_pages as kp
from trace_jax.kernels.kv_append import append
from trace_jax.kernels.kv_attention import _hopper as hopper_attention
from trace_jax.kernels.kv_attention import paged_attention
from trace_jax.kernels.kv_recent import append_recent, new_recent, read_recent

HEADS, D, W, TOKENS = 2, 64, 64, 150
STARTS = np.array([0, 40, 149])  # sequence b's first token comes at this step


@functools.partial(jax.jit, static_argnames="layout")
def decode(k, v, layout="auto"):
    """150 steps; sequences start late and idle before. k, v [3, 150, heads, D]."""
    pages = kp.new_pages(9, HEADS, D, layout=layout)
    recent = new_recent(3, W, HEADS, D, layout)
    table = jnp.arange(9).reshape(3, 3)

    def step(t, carry):
        pages, recent = carry
        at = t - STARTS
        pages = append(pages, table, at, k[:, t], v[:, t]).pages
        return pages, append_recent(recent, at, k[:, t], v[:, t])

    return jax.lax.fori_loop(0, TOKENS, step, (pages, recent))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def test_the_window_holds_the_last_tokens():
    k, v = normal(0, 3, TOKENS, HEADS, D), normal(1, 3, TOKENS, HEADS, D)
    _, recent = decode(k, v)
    lengths = jnp.array(TOKENS - STARTS, jnp.int32)
    got_k, got_v, token = jax.jit(read_recent)(recent, lengths)
    for b, length in enumerate(np.asarray(lengths)):
        held = np.asarray(token[b]) >= 0
        assert sorted(np.asarray(token[b])[held]) == list(range(max(0, length - W), length))
        for got, x in ((got_k, k), (got_v, v)):
            want = np.asarray(x[b], np.float32)[STARTS[b] + np.asarray(token[b])[held]]
            np.testing.assert_array_equal(np.asarray(got[b])[:, held].swapaxes(0, 1), want)


@pytest.mark.parametrize("version", versions(TRITON))
@pytest.mark.parametrize("window", (None, 20, 100))
def test_attention_reads_the_window_in_bf16_and_the_rest_from_the_pages(version, window):
    k, v = normal(0, 3, TOKENS, HEADS, D), normal(1, 3, TOKENS, HEADS, D)
    pages, recent = decode(k, v, layout_of(version))
    table, lengths = jnp.arange(9).reshape(3, 3), jnp.array(TOKENS - STARTS, jnp.int32)
    q = normal(2, 3, 4, D)
    out = jax.jit(paged_attention, static_argnames=("scale", "window", "version"))(
        q, pages, table, lengths, scale=0.125, window=window, recent=recent, version=version
    )
    stored = [np.asarray(x, np.float64).swapaxes(2, 3) for x in kp.read_pages(pages, table)]
    for b, length in enumerate(np.asarray(lengths)):
        both = []
        for x, paged in ((k, stored[0]), (v, stored[1])):
            true = np.asarray(x[b, STARTS[b] :], np.float64)
            old = paged[b].reshape(-1, HEADS, D)[:length]
            both.append(np.where(np.arange(length)[:, None, None] < length - W, old, true))
        live = slice(max(0, length - window) if window else 0, length)
        for h in range(4):
            s = both[0][live, h // 2] @ np.asarray(q[b, h], np.float64) * 0.125
            p = np.exp(s - s.max())
            want = p @ both[1][live, h // 2] / p.sum()
            assert relative_error(out[b, h], want) < 4.5e-3  # BF16 results; probabilities too


@ON_GPU
def test_the_window_is_added_to_sums_of_partial_results():
    """Nineteen pages, a partial result each: three sums of eight, and the window's."""
    count, lengths = 20, jnp.array([20 * 64, 19 * 64 - 5], jnp.int32)
    k, v = normal(0, 2 * count, 64, HEADS, D), normal(1, 2 * count, 64, HEADS, D)
    table = jnp.arange(2 * count).reshape(2, count)
    pages = kp.write_pages(kp.new_pages(2 * count, HEADS, D), table.ravel(), k, v)
    recent = new_recent(2, W, HEADS, D)
    for t in range(W):
        at = lengths - W + t
        token = [x.reshape(2, -1, HEADS, D)[jnp.arange(2), at] for x in (k, v)]
        recent = append_recent(recent, at, *token)
    q = normal(2, 2, 4, D)
    want = paged_attention(
        q, pages, table, lengths, scale=0.125, recent=recent, version="reference"
    )
    got = hopper_attention(q, pages, table, lengths, 0.125, None, None, recent, split=1)
    assert relative_error(got, want) < 4.5e-3


def test_refusals():
    with pytest.raises(ValueError, match="write a positive multiple of 64"):
        new_recent(2, 100, HEADS, D)
    recent, one = new_recent(1, W, HEADS, D), jnp.ones(1, jnp.int32)
    pages = kp.new_pages(1, HEADS, D, layout="tpu")
    with pytest.raises(ValueError, match="does not read a window of recent tokens"):
        paged_attention(
            normal(0, 1, 2, D), pages, one[None] - 1, one, scale=1.0, recent=recent,
            version="pallas_interpret",
        )  # fmt: skip
