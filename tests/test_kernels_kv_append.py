"""Adding tokens to paged K and V: one suite for every version, byte for byte what pages hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import ON_GPU, TRITON, layout_of, versions

from trace_jax.fp4 import NVFP4, GuidancePlan, compact, quantize_site
from trace_jax.kernels import kv_pages as kp
from trace_jax.kernels import kv_units
from trace_jax.kernels.kv_append import append
from trace_jax.kernels.kv_attention import paged_attention

HEADS = 2
VERSIONS = pytest.mark.parametrize("version", versions(TRITON))
KINDS = pytest.mark.parametrize("kind", kv_units.KINDS)
# The reference knows no head sizes of its own: one is enough for it.
HEAD_SIZES = pytest.mark.parametrize(
    "version, d",
    [
        ("reference", 64),
        *(pytest.param(v, d, marks=ON_GPU) for v in ("hopper", "triton") for d in (64, 128, 256)),
    ],
)

write_pages = jax.jit(kp.write_pages)
add = jax.jit(append, static_argnames=("record", "version"))


@functools.partial(jax.jit, static_argnames="version", donate_argnums=0)
def add_all(pages, table, k, v, version):
    """Tokens 0 to 63 of k, v [batch, 64, heads, D], one after the other."""

    def step(t, pages):
        return append(pages, table, jnp.full(len(k), t), k[:, t], v[:, t], version=version).pages

    return jax.lax.fori_loop(0, kv_units.PAGE, step, pages)


def tokens(seed, *shape):
    """Normal values, rows and blocks of every size, with ties, zeros and large values."""
    key = jax.random.key(seed)
    x = jax.random.normal(key, shape).reshape(*shape[:-1], -1, 16)
    power = jax.random.randint(jax.random.fold_in(key, 1), (*x.shape[:-1], 1), -12, 12)
    x = (x * jnp.exp2(power.astype(jnp.float32))).reshape(-1, shape[-1])
    ties = jnp.tile(jnp.array([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5, 6]), shape[-1] // 8)
    x = x.at[0].set(0).at[1].set(ties).at[2].set(-ties * 48).at[3].set(x[3] * 2.0**100)
    x = x.at[4].set(ties * 2.0**-120).at[5].set(1.75 * 2.0**9).at[6].set(1.7578125 * 2.0**9)
    return x.reshape(shape).astype(jnp.bfloat16)


@HEAD_SIZES
@KINDS
def test_append_equals_write(version, kind, d):
    k, v = tokens(0, 2, 64, HEADS, d), tokens(1, 2, 64, HEADS, d)
    ids, table = jnp.array([3, 1]), jnp.array([[3, 0], [1, 2]])
    empty = kp.new_pages(4, HEADS, d, kind, layout_of(version))
    want = write_pages(empty, ids, k, v)
    # Slots filled before by another sequence are replaced, not merged with.
    pages = write_pages(empty, ids, v, k)
    pages = add_all(pages, table, k, v, version)
    np.testing.assert_array_equal(pages.data, want.data)


@VERSIONS
@KINDS
def test_only_the_token_s_own_slot_changes(version, kind):
    k, v = tokens(0, 5, 64, HEADS, 64), tokens(1, 5, 64, HEADS, 64)
    pages = kp.new_pages(5, HEADS, 64, kind, layout_of(version))
    pages = write_pages(pages, jnp.arange(5), k, v)
    table = jnp.array([[3, 0], [1, 2], [4, 4], [4, 4]])
    positions = jnp.array([-1, 64 + 37, 128, -128])  # idle, page 2, past the table, idle
    out = add(pages, table, positions, k[:4, 0], v[:4, 1], version=version).pages
    want_k, want_v = k.at[2, 37].set(k[1, 0]), v.at[2, 37].set(v[1, 1])
    want = write_pages(pages, jnp.arange(5), want_k, want_v)
    np.testing.assert_array_equal(out.data, want.data)
    assert (np.asarray(out.data) != np.asarray(pages.data)).any(axis=(1, 2, 3)).tolist() == [
        False, False, True, False, False,
    ]  # fmt: skip


@HEAD_SIZES
@pytest.mark.parametrize("bits", (0, 1, 4))
def test_the_record_is_what_the_guidance_keeps(version, bits, d):
    k, v = tokens(0, 5, HEADS, d), tokens(1, 5, HEADS, d)
    table, positions = jnp.arange(5)[:, None], jnp.array([0, 1, 2, 63, -1])
    pages = kp.new_pages(5, HEADS, d, layout=layout_of(version))
    out = add(pages, table, positions, k, v, record=bits, version=version)
    for got, x in ((out.k, k), (out.v, v)):
        with jax.default_device(jax.devices("cpu")[0]):
            q = jax.jit(quantize_site, static_argnums=1)(jax.device_get(x), kv_units.KV_FORMAT)
            want = compact(q.codes, q.scale_bytes, GuidancePlan(bits=bits))
        np.testing.assert_array_equal(got.scales, want.scales)
        assert (got.bits is None) == (bits == 0)
        if bits:
            np.testing.assert_array_equal(got.bits, want.bits)
    plain = add(pages, table, positions, k, v, version=version)
    assert plain.k is None and plain.v is None
    np.testing.assert_array_equal(plain.pages.data, out.pages.data)


@VERSIONS
@pytest.mark.parametrize("kind", ("nvfp4", "fp8"))
@pytest.mark.parametrize("bad", (jnp.nan, jnp.inf, -jnp.inf))
def test_bad_rows_are_seen(version, kind, bad):
    k = tokens(7, 2, 64, HEADS, 64).clip(-99, 99).at[1, 5, 0, 3].set(bad)
    pages = kp.new_pages(2, HEADS, 64, kind, layout_of(version))
    pages = add_all(pages, jnp.arange(2)[:, None], k, k, version)
    for value in jax.jit(kp.read_pages)(pages, jnp.arange(2)):
        finite = np.isfinite(np.asarray(value)).any(axis=-1)
        assert not finite[1, 0, 5] and finite.sum() == finite.size - 1
    q = jnp.ones((2, HEADS, 64), jnp.bfloat16)
    table, lengths = jnp.arange(2)[:, None], jnp.full(2, 64)
    out = paged_attention(q, pages, table, lengths, scale=0.1, version=version)
    assert np.isfinite(np.asarray(out, np.float32)).all(axis=-1).tolist() == [
        [True, True], [False, True],
    ]  # fmt: skip


@ON_GPU
@KINDS
def test_a_loop_copies_no_pool(kind):
    pages = kp.new_pages(16, HEADS, 128, kind)
    k = tokens(0, 2, 64, HEADS, 128)
    text = add_all.lower(pages, jnp.array([[3], [1]]), k, k, "hopper").compile().as_text()
    pool = f"u8[{','.join(map(str, pages.data.shape))}]"
    assert "trace_jax_kv_append" in text and pool in text
    assert not [line for line in text.splitlines() if pool in line and " copy" in line]


def test_refusals():
    pages, table = kp.new_pages(2, HEADS, 64), jnp.zeros((1, 1), jnp.int32)
    k, at = jnp.zeros((1, HEADS, 64), jnp.bfloat16), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"both need \(1, 2, 64\)"):
        append(pages, table, at, k, k[..., :32])
    with pytest.raises(ValueError, match="record is 2; write None, 0, 1 or 4"):
        append(pages, table, at, k, k, record=2)
    with pytest.raises(ValueError, match="fp8 pages have no FP4 outcomes"):
        append(kp.new_pages(2, HEADS, 64, "fp8"), table, at, k, k, record=1)
    with pytest.raises(ValueError, match="layout 'hopper', not 'tpu'"):
        append(kp.new_pages(2, HEADS, 64, layout="tpu"), table, at, k, k, version="hopper")
    with pytest.raises(ValueError, match="write one of nvfp4, fp8, bf16"):
        kp.new_pages(2, HEADS, 64, NVFP4.name + "x")
