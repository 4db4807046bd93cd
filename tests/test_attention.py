"""The stored planes of the KV-cache, masks, grouped queries and rotary positions."""

from functools import partial

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import fp4
from trace_jax.fp4 import formats
from trace_jax.model import attention, kv_planes
from trace_jax.model.layers import rotary

KV_FORMATS = {
    "nvfp4": fp4.NVFP4.replace(outer="pow2"),
    "nvfp4_4over6": fp4.NVFP4_4OVER6.replace(outer="pow2"),
    "mxfp4": fp4.MXFP4,
}


@jax.jit
def store_and_read(x):
    """{format: (value of the site, what the cache returns, the plane)}."""
    out = {}
    for name, fmt in KV_FORMATS.items():
        site = fp4.quantize_site(x, fmt)
        plane = kv_planes.encode_plane(site, fmt)
        out[name] = site.value, kv_planes.decode_plane(plane, x.shape[-1], fmt), plane
    return out


def awkward(head_dim):
    """Rows of every size, a row of zeros, one huge value, one tiny row, one NaN row."""
    rng = np.random.default_rng(head_dim)
    x = rng.standard_t(3, size=(2, 7, 3, head_dim)) * 10.0 ** rng.integers(-6, 7, (2, 7, 3, 1))
    x[0, 0] = 0.0
    x[0, 1, 0, :] = 1e-36
    x[0, 2, 1, 3] = 3e38
    x[1, 3, 2, 5] = np.nan
    return jnp.asarray(x, jnp.float32).astype(jnp.bfloat16)


def bits(x):
    return np.asarray(x).view(np.uint16)


@pytest.mark.parametrize("head_dim", [16, 24, 72])
def test_the_cache_returns_what_was_quantized_bit_for_bit(head_dim):
    """BR-030 too: neither 24 nor 72 is a whole number of blocks."""
    x = awkward(head_dim)
    for name, (value, read, plane) in store_and_read(x).items():
        nan = np.isnan(np.asarray(value, np.float32))
        assert nan[1, 3, 2].all() and nan.sum() == head_dim, name
        assert np.isnan(np.asarray(read, np.float32))[nan].all(), name
        np.testing.assert_array_equal(bits(read)[~nan], bits(value)[~nan], err_msg=name)
        blocks = -(-head_dim // KV_FORMATS[name].block)
        assert plane.scales.shape == (2, 7, 3, blocks), name
        empty = kv_planes.empty_plane((2, 7, 3), head_dim, KV_FORMATS[name])
        assert jax.tree.map(jnp.shape, empty) == jax.tree.map(jnp.shape, plane), name


def test_what_the_cache_returns_is_near_what_went_in():
    """Guards the test above: both sides wrong alike would pass it."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 3, 72)), jnp.bfloat16)
    for name, (_, read, _) in store_and_read(x).items():
        error = np.asarray(read, np.float32) - np.asarray(x, np.float32)
        assert 0.07 < error.std() < 0.14, name


@pytest.mark.parametrize("head_dim", [72, 514])
def test_one_formula_for_scale_bytes_allocates_and_strides(head_dim):
    """BR-030."""
    fmt = KV_FORMATS["nvfp4"]
    blocks = -(-head_dim // 16)
    plane = kv_planes.empty_plane((1, 2, 1), head_dim, fmt)
    assert plane.scales.shape[-1] == blocks == formats.num_blocks(head_dim, fmt)
    assert plane.data.shape[-1] == blocks * 8


def test_writes_land_at_their_positions_and_beyond_the_end_are_dropped():
    plane = kv_planes.KVPlane(jnp.zeros((3, 4, 1, 2)))
    new = kv_planes.KVPlane(1.0 + jnp.arange(3.0 * 2 * 2).reshape(3, 2, 1, 2))
    positions = jnp.array([[0, 2], [3, 4], [4, 99]])
    out = np.asarray(kv_planes.write_plane(plane, new, positions).data)[:, :, 0, 0]
    np.testing.assert_array_equal(out, [[1, 0, 3, 0], [0, 0, 0, 5], [0, 0, 0, 0]])


# --- attention ---------------------------------------------------------------------------


def attention_reference(q, k, v, mask):
    """float64 loop: query head h reads key head h // (heads / kv_heads)."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    batch, length, heads, dim = q.shape
    out = np.zeros((batch, length, heads, dim))
    for b, s, h in np.ndindex(batch, length, heads):
        kv = h // (heads // k.shape[2])
        seen = np.flatnonzero(mask[b, s])
        scores = k[b, seen, kv] @ q[b, s, h] / np.sqrt(dim)
        weights = np.exp(scores - scores.max())
        out[b, s, h] = weights / weights.sum() @ v[b, seen, kv]
    return out.reshape(batch, length, heads * dim)


def attention_inputs():
    rng = np.random.default_rng(2)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    q, k, v = normal(2, 5, 6, 24), normal(2, 8, 2, 24), normal(2, 8, 2, 24)
    mask = np.arange(8)[None, None] <= np.array([[1, 2, 3, 4, 5], [0, 0, 2, 5, 6]])[..., None]
    return q, k, v, mask


def test_attention_equals_a_loop_over_heads():
    q, k, v, mask = attention_inputs()
    out = np.asarray(attention.attend(q, k, v, jnp.asarray(mask)), np.float64)
    wanted = attention_reference(q, k, v, mask)
    assert np.linalg.norm(out - wanted) < 0.01 * np.linalg.norm(wanted)


def test_nan_in_a_slot_that_no_query_may_see_changes_nothing():
    """BR-025: masked V is replaced, not multiplied by zero."""
    q, k, v, mask = attention_inputs()
    clean = attention.attend(q, k, v, jnp.asarray(mask))
    bad_k, bad_v = k.at[:, 7].set(jnp.nan), v.at[0, 6:].set(jnp.nan)
    np.testing.assert_array_equal(
        bits(attention.attend(q, bad_k, bad_v, jnp.asarray(mask))), bits(clean)
    )


def test_rotary_turns_half_split_pairs_by_position_times_frequency():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(1, 4, 2, 24)).astype(np.float32)
    positions = np.array([[0, 1, 7, 300]])
    turned = np.asarray(rotary(jnp.asarray(x), jnp.asarray(positions), 10_000.0))
    angle = positions[0][:, None] * 10_000.0 ** (-np.arange(12) / 12)
    pairs = (x[..., :12] + 1j * x[..., 12:])[0] * np.exp(1j * angle)[:, None]
    wanted = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(turned[0], wanted, atol=1e-4)
    np.testing.assert_array_equal(turned[0, 0], x[0, 0])


# --- the cache inside the model -------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bf16", "nvfp4", "mxfp4"])
def test_nan_bytes_in_unused_slots_do_not_reach_the_logits(policy):
    """BR-025: free slots hold the NaN scale byte; the run ends before the last slots."""
    bad = {"bf16": None, "nvfp4": 0x7F, "mxfp4": 0xFF}[policy]
    clean = helpers.empty_cache(helpers.MOE, policy)
    poison = jax.tree.map(
        lambda a: jnp.full_like(a, jnp.nan if a.dtype == jnp.bfloat16 else bad), clean
    )
    tokens = helpers.random_tokens(helpers.ROWS, 4)
    wanted, *_ = helpers.decode(helpers.MOE, policy, clean, tokens)
    got, _, cache = helpers.decode(helpers.MOE, policy, poison, tokens)
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(got, wanted)
    stored, start = (cache[0]["k"], poison[0]["k"])
    rest = [np.asarray(plane.data)[:, :, 4:].view(np.uint8) for plane in (stored, start)]
    np.testing.assert_array_equal(*rest)  # and the poison is still there


def test_a_cache_used_before_gives_what_a_fresh_one_gives():
    """BR-027: scales come from the tokens stored now, nothing remains of a warm-up.

    BR-031: nor of any calibration, in whatever order.
    """
    run = partial(helpers.decode, helpers.MOE, "nvfp4")
    fresh = helpers.empty_cache(helpers.MOE, "nvfp4")
    tokens = helpers.random_tokens(helpers.ROWS, 4)
    wanted, *_ = run(fresh, tokens)
    warm_up, _, used = run(fresh, helpers.random_tokens(helpers.ROWS, 4, seed=9))
    got, *_ = run(used, tokens)
    assert not np.array_equal(warm_up, wanted)
    np.testing.assert_array_equal(got, wanted)
