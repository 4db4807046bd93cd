"""Attention of a decode step in one call: its parts bit for bit, whatever the others do."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import ON_GPU, poison, versions

from trace_jax.kernels import kv_pages as kp
from trace_jax.kernels import kv_units
from trace_jax.kernels.decode_attention import Heads, decode_attention
from trace_jax.kernels.kv_append import append
from trace_jax.kernels.kv_attention import paged_attention
from trace_jax.kernels.norm_rotary import norm_rotary

VERSIONS = pytest.mark.parametrize("version", versions())
KINDS = pytest.mark.parametrize("kind", kv_units.KINDS)
STATIC = ("eps", "scale", "window", "record", "version")
attend = jax.jit(decode_attention, static_argnames=STATIC)
EPS = 1e-6


@partial(jax.jit, static_argnames=("window", "record"))
def parts(projected, heads, pages, table, lengths, window, sink, record):
    count = projected.shape[1] // pages.head_size - 2 * pages.kv_heads
    q, k, v = norm_rotary(projected, count, pages.kv_heads, *heads, eps=EPS)
    stored = append(pages, table, lengths - 1, k, v, record=record)
    out = paged_attention(q, stored.pages, table, lengths, scale=0.1, window=window, sink=sink)
    return out, *stored


def call(kind, d, kv_heads, group, lengths, max_pages, norms=True):
    """A shuffled pool, full but for the new tokens, and the arguments of a step."""
    normal = lambda seed, *s: jax.random.normal(jax.random.key(seed), s, jnp.float32)
    batch = len(lengths)
    count = batch * max_pages
    ids = jax.random.permutation(jax.random.key(2), count + 3)[:count].astype(jnp.int32)
    pages = kp.new_pages(count + 3, kv_heads, d, kind)
    k, v = (normal(i, count, 64, kv_heads, d).astype(jnp.bfloat16) for i in (0, 1))
    pages = jax.jit(kp.write_pages)(pages, ids, k, v)
    angle = normal(5, batch, d // 2)
    weights = [1 + 0.1 * normal(i, d) if norms else None for i in (6, 7)]
    heads = Heads(*weights, jnp.cos(angle), jnp.sin(angle))
    projected = normal(8, batch, (kv_heads * (group + 2)) * d)
    table = ids.reshape(batch, max_pages)
    return projected, heads, pages, table, jnp.asarray(lengths, jnp.int32)


LENGTHS = (640, 0, 1, 64, 65, 639, 300, 128)
CASES = (  # head size, KV heads, query heads a KV head, window, sink
    (128, 2, 8, None, False),
    (64, 2, 5, 100, True),
    (256, 1, 16, None, True),
)


@VERSIONS
@KINDS
@pytest.mark.parametrize("d, kv_heads, group, window, sink", CASES)
def test_a_step_is_its_three_parts_bit_for_bit(version, kind, d, kv_heads, group, window, sink):
    if version == "reference" and d != 64:
        pytest.skip("the reference knows no head sizes of its own")
    given = call(kind, d, kv_heads, group, LENGTHS, 10, norms=d != 256)
    sink = jnp.linspace(-1, 1, kv_heads * group) if sink else None
    for record in (1, 4, 0, None) if kind == "nvfp4" else (None,):
        out, *stored = parts(*given, window, sink, record)
        poison((out.shape, jnp.bfloat16), ((len(LENGTHS) * 8, 8, d), jnp.float32))
        got = attend(
            *given, eps=EPS, scale=0.1, window=window, sink=sink, record=record, version=version
        )
        jax.tree.map(np.testing.assert_array_equal, tuple(got), (out, *stored))
        assert np.isfinite(np.asarray(out, np.float32)).all() and not np.asarray(out)[1].any()
        assert (got.k is None) == (record is None)
    changed = np.asarray(got.pages.data) != np.asarray(given[2].data)
    assert changed.any(axis=tuple(range(1, changed.ndim))).sum() == 7, "a page a sequence"


@ON_GPU
@KINDS
@pytest.mark.parametrize("lengths, max_pages", (((700, 1, 333, 64, 65, 699, 300, 512), 11),
                                                ((8191, 8192, 8190, 8129), 128)))  # fmt: skip
def test_a_sequence_gives_the_same_bits_alone_in_company_and_again(kind, lengths, max_pages):
    """Splits of eight pages: one, two and sixteen partial results; a hundred runs in a loop."""
    projected, heads, pages, table, lengths = call(kind, 128, 2, 8, lengths, max_pages)

    @jax.jit
    def run(lengths, pages):
        def step(_, carry):
            pages, first, same = carry
            got = decode_attention(
                projected, heads, pages, table, lengths, eps=EPS, scale=0.1, version="hopper"
            )
            same &= jnp.array_equal(got.out, first)
            return got.pages, first, same

        first = decode_attention(
            projected, heads, pages, table, lengths, eps=EPS, scale=0.1, version="hopper"
        )
        start = (first.pages, first.out, jnp.array(True))
        return first.out, jax.lax.fori_loop(0, 100, step, start)[2]

    together, again = run(lengths, pages)
    assert again, "runs differ"
    for row in range(len(lengths)):
        alone, _ = run(jnp.where(jnp.arange(len(lengths)) == row, lengths, 0), pages)
        np.testing.assert_array_equal(alone[row], together[row])
        assert not np.delete(np.asarray(alone), row, axis=0).any()


def test_what_cannot_run_is_refused():
    given = call("fp8", 64, 1, 2, (1,), 1)
    with pytest.raises(ValueError, match="fp8 pages have no FP4 outcomes; write record=None"):
        decode_attention(*given, eps=EPS, scale=0.1, record=1)
    with pytest.raises(ValueError, match="decode_attention: version 'hopper' cannot run"):
        decode_attention(*given, eps=EPS, scale=0.1, version="hopper")
