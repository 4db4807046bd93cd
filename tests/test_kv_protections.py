"""FP8 rows, the window of BF16 tokens and rotated V, against forms that share no code."""

import dataclasses
from functools import partial

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_helpers import fp8_rows

from trace_jax import fp4, model
from trace_jax.fp4 import FP8, LayerPrecision, PrecisionPolicy, Rule
from trace_jax.kernels import kv_pages, kv_units
from trace_jax.model import attention, kv_planes, paged, pools
from trace_jax.model.accounting import kv_bytes_per_token
from trace_jax.model.config_parts import Latent
from trace_jax.model.sites import LayerSpec, SiteInputs, Sites

quantize_fp8 = jax.jit(fp4.quantize_fp8)


def rows(width=64):
    """BF16 rows of many sizes; then ties, codes below 2^-6, the largest code, zeros, tiny, NaN."""
    rng = np.random.default_rng(width)
    x = rng.standard_t(3, size=(2, 20, width)) * 10.0 ** rng.integers(-6, 7, (2, 20, 1))
    x[1, 0] = np.tile([448, 17, 19, -21, 27, 1.0625, 2.0**-9, 1.5 * 2.0**-9], width // 8)
    x[1, 1] = np.tile([450, 0.5, 3.0, -1.0, 31, -0.0, 2.0**-8, 5 * 2.0**-9], width // 8)
    x[1, 2], x[1, 3], x[1, 4] = 0.0, 1e-36, np.tile([3e38, 1.0], width // 2)
    x[0, 5, 3], x[0, 6, 1] = np.nan, np.inf
    return jnp.asarray(x, jnp.float32).astype(jnp.bfloat16)


BAD = np.zeros((2, 20), bool)
BAD[0, 5:7] = True


# --- FP8 rows ---------------------------------------------------------------------------------


def test_fp8_rows_are_e4m3_over_the_smallest_fitting_power_of_two():
    x = rows()
    got = quantize_fp8(x)
    exact = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore"):
        wanted = fp8_rows(exact)
    value = np.asarray(got.value, np.float64)
    np.testing.assert_array_equal(value[~BAD], wanted[~BAD])
    assert np.isnan(value[BAD]).all()
    scale = np.ldexp(1.0, np.asarray(got.exponent, int) - 127)
    codes = np.asarray(got.codes).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal((codes * scale)[~BAD], wanted[~BAD])
    np.testing.assert_array_equal(got.exponent[BAD], 255)


def test_fp8_rows_are_those_of_the_kernels_pages():
    x = rows()
    got = quantize_fp8(x)
    fields = jax.jit(kv_units.encode, static_argnums=1)(x, "fp8")
    for mine, theirs in zip((got.codes, got.exponent), fields, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_gradient_of_fp8_rows_is_straight_through():
    x, g = rows(), jnp.asarray(np.random.default_rng(0).normal(size=(2, 20, 64)), jnp.bfloat16)
    back = jax.jit(lambda x, g: jax.vjp(lambda x: fp4.quantize_fp8(x).value, x)[1](g)[0])
    np.testing.assert_array_equal(back(x, g), g)


def test_a_plane_of_fp8_rows_returns_them_bit_for_bit():
    x = rows()[:, :, None]

    @jax.jit
    def through(x):
        out = fp4.quantize_fp8(x)
        plane = kv_planes.encode_plane(out, FP8)
        return out.value, plane, kv_planes.decode_plane(plane, x.shape[-1], FP8)

    value, plane, read = through(x)
    good = ~BAD
    bits = lambda a: np.asarray(a).view(np.uint16)[good]
    np.testing.assert_array_equal(bits(read), bits(value))
    assert np.isnan(np.asarray(read, np.float32)[BAD]).all()
    empty = kv_planes.empty_plane(x.shape[:3], 64, FP8)
    assert jax.tree.map(jnp.shape, empty) == jax.tree.map(jnp.shape, plane)
    assert sum(a.nbytes for a in jax.tree.leaves(plane)) == 2 * 20 * 65


def test_fp8_sites_are_neither_planned_nor_recorded():
    precision, left = helpers.PRECISIONS["fp8"], {"expert_in", "expert_mid"}
    assert set(model.planned_layers(helpers.MOE, precision, helpers.FULL)) == left
    spec = model.numerics(helpers.MOE, precision, plan=helpers.FULL, record=True, guide=True)
    assert {site for layer in spec.layers for site in (*layer.recorded, *layer.guided)} == left


def test_only_keys_and_values_have_fp8_rows():
    for tensor in ("expert_weight", "expert_in", "*"):
        with pytest.raises(ValueError, match="only k and v have FP8 rows; write one of nvfp4"):
            PrecisionPolicy((Rule(tensor, "fp8"),)).resolve(2)
    (layer,) = PrecisionPolicy((Rule("[kv]", "fp8"),)).resolve(1)
    assert layer == LayerPrecision(k=FP8, v=FP8)


# --- protections of a policy --------------------------------------------------------------------


def test_protections_hold_where_something_is_quantized():
    rules = (Rule("[kv]", "nvfp4"), Rule("*", "bf16", (0,)), Rule("v", "bf16", (1,)))
    layers = PrecisionPolicy(rules, kv_window=8, rotate_v=True).resolve(3)
    assert [(p.kv_window, p.rotate_v) for p in layers] == [(0, False), (8, False), (8, True)]
    with pytest.raises(ValueError, match="kv_window is -1; write 0 or more"):
        PrecisionPolicy(rules, kv_window=-1).resolve(3)


# --- rotation -------------------------------------------------------------------------------------


def test_the_rotation_is_sylvesters_matrix_and_its_own_inverse():
    matrix = np.ones((1, 1))
    while len(matrix) < 64:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = np.random.default_rng(1).normal(size=(5, 3, 64)).astype(np.float32)
    turn = jax.jit(fp4.hadamard)
    np.testing.assert_allclose(turn(x), x @ matrix / 8, atol=2e-6)
    np.testing.assert_allclose(turn(turn(x)), x, atol=2e-6)
    assert jax.eval_shape(turn, jnp.ones((2, 4), jnp.bfloat16)).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="size 24 is not a power of two; write rotate_v=False"):
        fp4.hadamard(jnp.ones((2, 24)))


def test_the_rotation_spreads_an_outlier():
    """What it is for: one large value costs the others of its block their FP4 steps."""
    x = np.random.default_rng(2).normal(size=(512, 64)).astype(np.float32)
    x[:, 5] *= 30
    quantized = lambda x: fp4.quantize_site(x, kv_units.KV_FORMAT).value
    plain = jax.jit(quantized)(x)
    turned = jax.jit(lambda x: fp4.hadamard(quantized(fp4.hadamard(x))))(x)
    beside = np.arange(64)[:16] != 5
    error = lambda y: np.abs(np.asarray(y, np.float32) - x)[:, :16][:, beside].mean()
    assert error(turned) < 0.8 * error(plain)


def logits_of(config, precision, params, tokens):
    spec = model.numerics(config, precision)
    return np.asarray(helpers.forward(config, spec, params, tokens)[1], np.float64)


def test_rotation_alone_is_the_same_function():
    """V stays BF16: only its rounding in another basis is left."""
    config, tokens = helpers.TURNED, helpers.random_tokens(3, 8)
    params = helpers.params_of(config)
    plain = logits_of(config, (LayerPrecision(),) * 3, params, tokens)
    turned = logits_of(config, (LayerPrecision(rotate_v=True),) * 3, params, tokens)
    error = np.linalg.norm(turned - plain) / np.linalg.norm(plain)
    assert 1e-4 < error < 0.02, error


LATENT = dataclasses.replace(
    helpers.DENSE,
    num_kv_heads=4,
    qk_norm=False,
    latent=Latent(kv_rank=16, q_rank=0, nope_dim=16, rope_dim=8, v_dim=12),
)


def test_latent_attention_refuses_the_rotation():
    spec = model.numerics(LATENT, helpers.PRECISIONS["rotated"])
    params = jax.eval_shape(partial(model.init, LATENT), jax.random.key(0))
    with pytest.raises(ValueError, match="values of latent attention are its keys too"):
        jax.eval_shape(lambda p: model.apply(LATENT, p, jnp.ones((1, 2), jnp.int32), spec), params)


# --- the window -----------------------------------------------------------------------------------


def two_sets(q, old, new, mask, window, positions, sinks):
    """float64 loop: keys nearer than `window` come from `new`, the others from `old`."""
    q, old, new = (jax.tree.map(lambda a: np.asarray(a, np.float64), x) for x in (q, old, new))
    out = np.zeros((*q.shape[:3], old[1].shape[-1]))
    for b, s, h in np.ndindex(q.shape[:3]):
        kv = h // (q.shape[2] // old[0].shape[2])
        near = positions[b, s] - np.arange(old[0].shape[1]) < window
        k, v = (np.where(near[:, None], n[b, :, kv], o[b, :, kv])
                for n, o in zip(new, old, strict=True))  # fmt: skip
        seen = np.flatnonzero(mask[b, s])
        scores = np.append(k[seen] @ q[b, s, h] / np.sqrt(q.shape[-1]), sinks[h])
        weights = np.exp(scores - scores.max())
        out[b, s, h] = (weights / weights.sum())[:-1] @ v[seen]
    return out.reshape(*q.shape[:2], -1)


@pytest.mark.parametrize("window, sliding", [(3, 0), (1, 0), (3, 5), (6, 4)])
def test_attention_reads_recent_keys_and_values_unquantized(window, sliding):
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    q, old, new = normal(2, 4, 6, 24), (normal(2, 9, 2, 24),) * 2, (normal(2, 9, 2, 24),) * 2
    positions, sinks = np.array([[1, 3, 4, 7], [5, 6, 7, 8]]), rng.normal(size=6)
    mask = np.asarray(attention.visible(jnp.asarray(positions), jnp.arange(9)[None], sliding))

    @jax.jit
    def attend(q, old, new):
        near = attention.visible(jnp.asarray(positions), jnp.arange(9)[None], window)
        recent = attention.Recent(*new, near)
        return attention.attend(q, *old, jnp.asarray(mask), jnp.asarray(sinks), recent=recent)

    out = np.asarray(attend(q, old, new), np.float64)
    wanted = two_sets(q, old, new, mask, window, positions, sinks)
    assert np.linalg.norm(out - wanted) < 0.01 * np.linalg.norm(wanted)
    # What no query reads of a set may be NaN there: a token that has not come, the newest
    # quantized, the oldest as it was.
    (old_k, old_v), (new_k, new_v) = old, new
    old = [x.at[0, 8].set(jnp.nan).at[1, 8].set(jnp.nan) for x in (old_k, old_v)]
    new = [x.at[0, 8].set(jnp.nan) for x in (new_k, new_v)]
    new = [x.at[1, : max(6 - window, 0)].set(jnp.nan) for x in new]
    np.testing.assert_array_equal(np.asarray(attend(q, old, new), np.float64), out)


@pytest.mark.parametrize("config", [helpers.DENSE, LATENT], ids=["grouped", "latent"])
def test_a_window_over_everything_is_a_bf16_cache(config):
    """And a smaller one is neither that nor the quantized cache."""
    tokens = helpers.random_tokens(3, 8)
    kv = (Rule("[kv]", "nvfp4"),)
    found = {
        window: logits_of(
            config,
            PrecisionPolicy(kv if window is not None else (), kv_window=window or 0).resolve(3),
            helpers.params_of(config),
            tokens,
        )
        for window in (None, 0, 3, 8)
    }
    np.testing.assert_array_equal(found[8], found[None])
    np.testing.assert_array_equal(found[3][:, :3], found[None][:, :3])
    # Token 3 is the first to read a quantized one, and token 1 would have been without a window.
    for other, first in ((None, 3), (0, 1)):
        assert np.abs(found[3][:, first] - found[other][:, first]).max() > 0.01, other


@pytest.mark.parametrize("policy, fmt, window", [("fp8", FP8, 0), ("window", fp4.NVFP4, 4)])
def test_caches_and_pools_have_the_bytes_that_the_accounting_says(policy, fmt, window):
    precision = helpers.PRECISIONS[policy]
    each = kv_bytes_per_token(helpers.MOE, fmt, window)
    cache = model.empty_cache(helpers.MOE, precision, 2, 12)
    pages = [pools.empty_pool(helpers.MOE, p, 6, 4, False) for p in precision]
    kind = helpers.MOE.layer_kinds[0]
    states = [pools.empty_state(helpers.MOE, p, kind, 2, False) for p in precision]
    held = lambda stored: sum(a.nbytes for a in jax.tree.leaves(stored))
    assert held(cache) == 24 * each
    # Pages hold the quantized rows alone, and a state the last tokens of its sequence.
    assert held(pages) == 24 * kv_bytes_per_token(helpers.MOE, fmt)
    assert held(states) == 2 * window * kv_bytes_per_token(helpers.MOE, None)


# --- kernel pools under emulated engine noise ---------------------------


@pytest.mark.parametrize("length", [64, 1], ids=["prefill", "decode"])
def test_the_kernels_pages_hold_what_the_record_says_under_noise(length):
    config = dataclasses.replace(helpers.MOE, head_dim=64)
    precision = helpers.PRECISIONS["nvfp4"][0]
    spec = LayerSpec(precision, audit_rows=1)
    stored = pools.Stored(pools.empty_pool(config, precision, 2, 64, True))
    rng = np.random.default_rng(5)
    normal = lambda heads: jnp.asarray(rng.normal(size=(1, length, heads, 64)), jnp.bfloat16)
    q, k, v = normal(4), normal(2), normal(2)

    @jax.jit
    def step(q, k, v, stored):
        inputs = SiteInputs(noise_key=jax.random.key(0), noise=0.1)
        sites = Sites(spec, fp4.NO_GUIDANCE, inputs, decoding=True)
        where = paged.Pages(jnp.array([[1]]), jnp.ones((1, length), bool))
        _, stored = where.step(q, k, v, stored, jnp.arange(length)[None], sites, None, None)
        return kv_pages.read_pages(stored.pages, jnp.array([1])), sites.outputs.audit

    pages, audit = step(q, k, v, stored)
    for site, values in zip("kv", pages, strict=True):
        codes = jax.tree.map(lambda a: a[0], audit[site])
        scale = fp4.formats.decode_scale(codes.scale_bytes, precision.k)[..., None]
        blocks = fp4.formats.decode_e2m1(fp4.formats.to_blocks(codes.codes, precision.k)) * scale
        wanted = blocks.reshape(length, 2, 64) * codes.outer
        np.testing.assert_array_equal(values[0, :, :length].swapaxes(0, 1), wanted)
