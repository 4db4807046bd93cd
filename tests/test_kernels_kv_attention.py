"""Paged decode attention and its pages: one suite for every version, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import (
    ON_GPU,
    TRITON,
    decode,
    fp8_rows,
    layout_of,
    relative_error,
    versions,
)

from trace_jax.fp4 import quantize
from trace_jax.kernels import kv_attention as ka
from trace_jax.kernels import kv_pages as kp
from trace_jax.kernels import kv_units

write_pages = jax.jit(kp.write_pages)
attention = jax.jit(ka.paged_attention, static_argnames=("scale", "window", "version"))
quantize_rows = jax.jit(lambda x: quantize(x, kv_units.KV_FORMAT, outer_axes=(x.ndim - 1,)))

KINDS = pytest.mark.parametrize("kind", kv_units.KINDS)
HEADS = pytest.mark.parametrize("d", (64, 128, 256))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def spread(seed, *shape):
    """Normal values whose size varies by row, from 2^-4 to 2^3."""
    power = jax.random.randint(jax.random.key(seed + 9), (*shape[:-1], 1), -4, 4)
    return normal(seed, *shape) * jnp.exp2(power.astype(jnp.float32)).astype(jnp.bfloat16)


def stored(x, kind):
    """Float64 values that pages hold of x [..., D]."""
    if kind == "nvfp4":
        return decode(quantize_rows(x))
    x = np.asarray(x, np.float64)
    return x if kind == "bf16" else fp8_rows(x)


def cache(batch, max_pages, kv_heads, d, kind, k=None, v=None, version="reference"):
    """A shuffled pool, its table, and the float64 K and V [batch, tokens, kv_heads, D]."""
    count = batch * max_pages
    k = spread(0, count, 64, kv_heads, d) if k is None else k
    v = spread(1, count, 64, kv_heads, d) if v is None else v
    ids = jax.random.permutation(jax.random.key(2), count + 3)[:count].astype(jnp.int32)
    empty = kp.new_pages(count + 3, kv_heads, d, kind, layout_of(version))
    pages = write_pages(empty, ids, k, v)
    values = [stored(x, kind).reshape(batch, -1, kv_heads, d) for x in (k, v)]
    return pages, ids.reshape(batch, max_pages), *values


def oracle(q, k, v, lengths, scale, window=None, sink=None):
    q = np.asarray(q, np.float64)
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[2]
    for b, length in enumerate(np.asarray(lengths)):
        live = slice(max(0, length - window) if window else 0, length)
        for h in range(q.shape[1]):
            if length == 0:
                continue
            s = k[b, live, h // group] @ q[b, h] * scale
            extra = [] if sink is None else [float(sink[h])]
            p = np.exp(np.append(s, extra) - max([*s, *extra]))
            out[b, h] = p[: len(s)] @ v[b, live, h // group] / p.sum()
    return out


def check(out, want):
    """Each sequence by itself: BF16 probabilities and outputs allow 4e-3, and no more."""
    for got, row in zip(np.asarray(out, np.float64), want, strict=True):
        if not row.any():
            assert not got.any()
        else:
            assert relative_error(got, row) < 4.5e-3
    assert relative_error(out, want) > 1e-4  # not rounded to BF16 is wrong too


@pytest.mark.parametrize("version", versions(TRITON))
@KINDS
@pytest.mark.parametrize("d, group", ((64, 1), (64, 5), (128, 8), (256, 16)))
def test_attention(version, kind, d, group):
    pages, table, k, v = cache(4, 3, 2, d, kind, version=version)
    lengths = jnp.array([0, 1, 100, 192], jnp.int32)
    q = normal(3, 4, 2 * group, d)
    out = attention(q, pages, table, lengths, scale=d**-0.5, version=version)
    check(out, oracle(q, k, v, lengths, d**-0.5))


@pytest.mark.parametrize("version", versions(TRITON))
@KINDS
def test_every_offset_in_a_page(version, kind):
    pages, table, k, v = cache(64, 2, 1, 64, kind, version=version)
    lengths = jnp.arange(64, dtype=jnp.int32) + 33  # ends 33..96: every place, both pages
    q = normal(3, 64, 2, 64)
    out = attention(q, pages, table, lengths, scale=0.125, version=version)
    check(out, oracle(q, k, v, lengths, 0.125))


@pytest.mark.parametrize("version", versions(TRITON))
@KINDS
@pytest.mark.parametrize("window", (1, 100, 1000))
def test_window_and_sink(version, kind, window):
    pages, table, k, v = cache(4, 4, 2, 128, kind, version=version)
    lengths = jnp.array([201, 256, 64, 7], jnp.int32)
    q, sink = normal(3, 4, 16, 128), jax.random.normal(jax.random.key(4), (16,)) * 3
    out = attention(q, pages, table, lengths, scale=0.1, window=window, sink=sink, version=version)
    check(out, oracle(q, k, v, lengths, 0.1, window, sink))


def test_window_counts_the_current_token():
    # BR-093: window 128 and the query at 200 see keys 73..200.
    k = jnp.zeros((4, 64, 1, 64), jnp.bfloat16)
    v = jnp.zeros((256, 64), jnp.bfloat16).at[72].set(1000).at[73].set(128).reshape(4, 64, 1, 64)
    pages, table, _, _ = cache(1, 4, 1, 64, "bf16", k, v)
    q = jnp.zeros((1, 1, 64), jnp.bfloat16)
    out = attention(q, pages, table, jnp.array([201]), scale=1.0, window=128)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)


@pytest.mark.parametrize("version", versions(TRITON))
@KINDS
def test_unused_slots_have_no_effect(version, kind):
    k, v = spread(0, 3, 64, 2, 128), spread(1, 3, 64, 2, 128)
    lengths = jnp.array([150], jnp.int32)
    q = normal(3, 1, 16, 128)
    outs = []
    for filler in (0.0, jnp.nan, 3e38):
        used = (jnp.arange(192) < 150).reshape(3, 64, 1, 1)
        both = [jnp.where(used, x, jnp.bfloat16(filler)) for x in (k, v)]
        pages, table, _, _ = cache(1, 3, 2, 128, kind, *both, version=version)
        outs.append(attention(q, pages, table, lengths, scale=0.1, version=version))
    np.testing.assert_array_equal(outs[1], outs[0])
    np.testing.assert_array_equal(outs[2], outs[0])


@pytest.mark.parametrize("version", versions(TRITON))
def test_lengths_of_any_spread(version):
    lengths = jnp.array([0, 640, 1, 0, 64, 65, 639, 2], jnp.int32)
    pages, table, k, v = cache(8, 10, 2, 64, "nvfp4", version=version)
    q = normal(3, 8, 8, 64)
    out = attention(q, pages, table, lengths, scale=0.125, version=version)
    check(out, oracle(q, k, v, lengths, 0.125))


@ON_GPU
@KINDS
@HEADS
@pytest.mark.parametrize("split", (1, 3, 16))
def test_splits_of_any_size(kind, d, split):
    """Up to 40 partial results, five sums of eight."""
    lengths = jnp.array([40 * 64, 0, 1000, 64 * split], jnp.int32)
    pages, table, k, v = cache(4, 40, 1, d, kind)
    q = normal(3, 4, 5, d)
    out = jax.jit(partial(ka._hopper, scale=0.1, window=None, sink=None, split=split))(
        q, pages, table, lengths
    )
    check(out, oracle(q, k, v, lengths, 0.1))


@pytest.mark.parametrize("kind", kv_units.KINDS)
@pytest.mark.parametrize("batch, pages", [(64, 129), (16, 513), (256, 33), (320, 33), (496, 129)])
def test_splits_leave_few_warps_idle(kind, batch, pages):
    """The rounds that the splits make cost at most 40 % more than even shares would."""
    warps = ka.BLOCKS * ka.HOPPER_VARIANTS[kind, 128][0][1]
    split = ka.split_pages(4 * batch, pages, warps)
    splits = ka.split_count(split, pages)
    assert 8 <= split <= 20
    rounds = -(-4 * batch * splits // warps)
    assert rounds * pages / splits <= 1.4 * 4 * batch * pages / warps


@ON_GPU
@KINDS
def test_a_sequence_gives_the_same_bits_alone_and_in_company(kind):
    """Eleven pages are two splits, wherever the shares of the warps begin."""
    lengths = jnp.array([700, 1, 333, 64, 65, 699, 300, 512], jnp.int32)
    pages, table, _, _ = cache(8, 11, 2, 128, kind)
    q = normal(3, 8, 8, 128)
    run = jax.jit(partial(attention, scale=0.1))
    together = run(q, pages, table, lengths)
    for row in range(8):
        alone = run(q, pages, table, jnp.where(jnp.arange(8) == row, lengths, 0))
        np.testing.assert_array_equal(alone[row], together[row])


@ON_GPU
@pytest.mark.parametrize(
    "kind, d, variant",
    [(kind, d, v) for (kind, d), several in ka.HOPPER_VARIANTS.items() for v in several],
)
def test_every_compiled_kernel(kind, d, variant):
    """Dispatch takes the first of a kind and head size; the benchmark also times the others."""
    lengths = jnp.array([640, 1, 0, 64, 65, 639, 300, 2], jnp.int32)
    pages, table, k, v = cache(8, 10, 2, d, kind)
    q = normal(3, 8, 8, d)
    out = jax.jit(partial(ka._hopper, scale=0.1, window=None, sink=None, variant=variant))(
        q, pages, table, lengths
    )
    check(out, oracle(q, k, v, lengths, 0.1))


BITS = {"nvfp4": 4.5, "fp8": 8, "bf16": 16}


@KINDS
@HEADS
def test_pages_hold_the_codec_s_values(kind, d):
    k, v = spread(0, 2, 64, 2, d), spread(1, 2, 64, 2, d).at[1].set(0)
    pages = write_pages(kp.new_pages(2, 2, d, kind), jnp.array([1, 0]), k, v)
    got = jax.jit(kp.read_pages)(pages, jnp.array([1, 0]))
    for value, x in zip(got, (k, v), strict=True):
        np.testing.assert_array_equal(np.asarray(value), stored(x, kind).transpose(0, 2, 1, 3))
    exponents = 0 if kind == "bf16" else 64
    assert pages.data.nbytes == 2 * 2 * 2 * (64 * d * BITS[kind] / 8 + exponents)


def test_fp8_rows_are_more_than_three_times_as_accurate_as_fp4_ones():
    x = spread(5, 64, 128)
    fp8, fp4 = (relative_error(stored(x, kind), x) for kind in ("fp8", "nvfp4"))
    assert 0.02 < fp8 < 0.028 and fp4 > 3.3 * fp8


def test_errors():
    with pytest.raises(ValueError, match="head size 80"):
        kp.new_pages(1, 1, 80)
    pages, table = kp.new_pages(2, 2, 64), jnp.zeros((1, 1), jnp.int32)
    one = jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match="do not fit"):
        ka.paged_attention(normal(0, 1, 3, 64), pages, table, one, scale=1.0)
    with pytest.raises(ValueError, match="window is 0"):
        ka.paged_attention(normal(0, 1, 2, 64), pages, table, one, scale=1.0, window=0)
