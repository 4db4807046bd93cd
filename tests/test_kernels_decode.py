"""The small ops of a decode step, one suite for every version, against float64 and the codec."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import poison, versions

from trace_jax import fp4
from trace_jax.fp4 import NVFP4, GuidancePlan
from trace_jax.kernels.add_norm import add_norm
from trace_jax.kernels.fake_quantize import fake_quantize_rows
from trace_jax.kernels.norm_rotary import norm_rotary
from trace_jax.kernels.top_k import choose_experts

VERSIONS = pytest.mark.parametrize("version", versions())
ROWS_FORMAT = NVFP4.replace(outer="pow2")

fake = jax.jit(fake_quantize_rows, static_argnames=("fmt", "record", "version"))
choose = jax.jit(choose_experts, static_argnames=("top_k", "normalize", "version"))
turn = jax.jit(norm_rotary, static_argnums=(1, 2), static_argnames=("eps", "version"))
added = jax.jit(add_norm, static_argnames=("eps", "fmt", "record", "version"))
site = jax.jit(fp4.quantize_site, static_argnums=1)


def rows(count, width, seed=0):
    """BF16 rows with blocks of every size, ties, zeros, and the largest values."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, width // 16, 16)) * 2.0 ** rng.integers(
        -12, 12, (count, width // 16, 1)
    )
    x = x.reshape(count, width)
    ties = np.tile([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5, 6], width // 8)
    x[0], x[1], x[2], x[3] = 0, ties, -ties * 48, x[3] * 2.0**100
    x[4, ::2] = -0.0
    return jnp.asarray(x, jnp.bfloat16)


# --- fake quantization ---


@VERSIONS
@pytest.mark.parametrize("width", (64, 768, 2048, 4096))
def test_values_and_guidance_are_the_codecs(version, width):
    x = rows(70, width)
    out = site(x, ROWS_FORMAT)
    for bits in (1, 4, 0):
        poison((x.shape, jnp.bfloat16))
        value, left = fake(x, ROWS_FORMAT, record=bits, version=version)
        want = fp4.compact(out.codes, out.scale_bytes, GuidancePlan(bits=bits))
        np.testing.assert_array_equal(
            np.asarray(value, np.float32), np.asarray(out.value, np.float32)
        )
        np.testing.assert_array_equal(left.scales, want.scales)
        assert (left.bits is None) == (bits == 0)
        if bits:
            np.testing.assert_array_equal(left.bits, want.bits)
    value, left = fake(x, ROWS_FORMAT, version=version)
    assert left is None and value.shape == x.shape


@VERSIONS
def test_a_row_with_nan_or_inf_is_nan_and_its_neighbours_are_not(version):
    x = rows(5, 64).at[1, 3].set(jnp.nan).at[3, 60].set(-jnp.inf)
    value, left = fake(x, ROWS_FORMAT, record=1, version=version)
    bad = np.isnan(np.asarray(value, np.float32)).all(axis=1)
    np.testing.assert_array_equal(bad, [False, True, False, True, False])
    assert (np.asarray(left.scales)[[1, 3]] == 0x7F).all()


# --- residual, norm, quantization ---


@VERSIONS
@pytest.mark.parametrize("width", (64, 768, 2048, 4096))
def test_residual_norm_and_the_codec_in_one(version, width):
    rng = np.random.default_rng(width)
    size = 2.0 ** rng.integers(-6, 6, (70, 1))
    x, y = (jnp.asarray(rng.normal(size=(70, width)) * size, jnp.bfloat16) for _ in range(2))
    weight = jnp.asarray(1 + 0.2 * rng.normal(size=width), jnp.float32)
    for record in (1, 4, 0, None):
        poison((x.shape, jnp.bfloat16))
        got = added(x, y, weight, eps=1e-6, fmt=ROWS_FORMAT, record=record, version=version)
        total = np.asarray(x, np.float32) + np.asarray(y, np.float32)
        total = np.asarray(jnp.asarray(total).astype(jnp.bfloat16), np.float64)
        np.testing.assert_array_equal(np.asarray(got.sum, np.float64), total)
        rms = np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6)
        want = total / rms * np.asarray(weight, np.float64)
        error = np.abs(np.asarray(got.normed, np.float64) - want)
        assert (error <= np.abs(want) * (2.0**-8 + 1e-6)).all(), "one rounding to BF16"
        same = np.asarray(got.normed, np.float64) == bf16(want)
        assert same.mean() > 0.999, "but where FP32 falls on the other side of a tie"
        # The quantized rows are the codec's of the very rows that were normed.
        value, left = fake(got.normed, ROWS_FORMAT, record=record, version="reference")
        np.testing.assert_array_equal(
            np.asarray(got.value, np.float32), np.asarray(value, np.float32)
        )
        jax.tree.map(np.testing.assert_array_equal, got.guidance, left)
    # An addend in FP32 is rounded first.
    finer = y.astype(jnp.float32) * (1 + 2.0**-10)
    for addend in (y, finer):
        plain = added(x, addend, weight, eps=1e-6, version=version)
        assert plain.value is None and plain.guidance is None
        jax.tree.map(np.testing.assert_array_equal, plain[:2], got[:2])


@VERSIONS
@pytest.mark.parametrize("count, width", ((1, 64), (8, 2048), (10, 4096)))
def test_weighted_rows_are_added_up_first(version, count, width):
    """Integers and powers of two: their sum is exact in any order, and then rounded once."""
    rng = np.random.default_rng(count)
    x = jnp.asarray(rng.normal(size=(5, 1, width)), jnp.bfloat16)
    y = rng.integers(-128, 128, (5, 1, count, width)).astype(np.float32)
    gates = 2.0 ** -rng.integers(0, 8, (5, 1, count)).astype(np.float32)
    weight = jnp.asarray(1 + 0.2 * rng.normal(size=width), jnp.float32)
    got = added(x, jnp.asarray(y), weight, gates=jnp.asarray(gates), eps=1e-6, version=version)
    total = jnp.asarray((y.astype(np.float64) * gates[..., None]).sum(2), jnp.float32)
    want = added(x, total.astype(jnp.bfloat16), weight, eps=1e-6, version="reference")
    np.testing.assert_array_equal(got.sum, want.sum)
    same = np.asarray(got.normed) == np.asarray(want.normed)
    assert same.mean() > 0.999 and not np.array_equal(got.sum, x)


# --- routing ---


@VERSIONS
@pytest.mark.parametrize(
    "experts,top_k", ((128, 8), (64, 8), (32, 4), (7, 2), (256, 10), (512, 32))
)
def test_experts_are_the_largest_and_gates_their_softmax(version, experts, top_k):
    rng = np.random.default_rng(experts)
    parts = rng.normal(size=(37, 3, experts)).astype(np.float32) * np.float32([[3], [0.5], [0.1]])
    logits = parts[:, 2] + parts[:, 1] + parts[:, 0]
    probs = np.exp(logits - logits.max(-1, keepdims=True), dtype=np.float64)
    probs /= probs.sum(-1, keepdims=True)
    want = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]
    picked = np.take_along_axis(probs, want, -1)
    for normalize in (False, True):
        ids, gates, order = choose(jnp.asarray(parts), top_k, normalize=normalize, version=version)
        np.testing.assert_array_equal(ids, want)
        np.testing.assert_array_equal(order.slot, np.argsort(want.reshape(-1), kind="stable"))
        starts = np.searchsorted(np.sort(want.reshape(-1)), np.arange(experts + 1))
        np.testing.assert_array_equal(order.offset, starts)
        share = picked / picked.sum(-1, keepdims=True) if normalize else picked
        np.testing.assert_allclose(gates, share, rtol=3e-6)


@VERSIONS
def test_equal_logits_go_to_the_lower_expert(version):
    logits = jnp.zeros((3, 128)).at[1, 100].set(1.0).at[2].set(jnp.tile(jnp.arange(4.0), 32))
    ids, *_ = choose(logits[:, None], 4, normalize=True, version=version)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3], [100, 0, 1, 2], [3, 7, 11, 15]])


@VERSIONS
def test_a_token_without_a_number_still_names_experts_that_exist(version):
    logits = jnp.full((2, 1, 16), jnp.nan).at[1, 0, 3].set(1.0)
    ids, _, order = choose(logits, 4, normalize=True, version=version)
    assert (np.asarray(ids) < 16).all() and (np.asarray(ids) >= 0).all()
    np.testing.assert_array_equal(np.sort(order.slot), np.arange(8))


@VERSIONS
@pytest.mark.parametrize("tokens", (1, 600, 1100))
def test_slots_of_any_number_of_tokens_are_in_order(version, tokens):
    logits = jax.random.normal(jax.random.key(tokens), (tokens, 1, 40))
    ids, _, order = choose(logits, 8, normalize=True, version=version)
    ids = np.asarray(ids).reshape(-1)
    np.testing.assert_array_equal(order.slot, np.argsort(ids, kind="stable"))
    np.testing.assert_array_equal(order.offset, np.searchsorted(np.sort(ids), np.arange(41)))


# --- norm and rotation ---


def bf16(x):
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float64)


@VERSIONS
@pytest.mark.parametrize("normed", (True, False))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_heads_are_normed_then_turned_and_values_pass(version, d, normed):
    rng = np.random.default_rng(d)
    tokens, heads, kv_heads = 9, 6, 2
    projected = (rng.normal(size=(tokens, (heads + 2 * kv_heads) * d)) * 3).astype(np.float32)
    weights = [jnp.asarray(rng.uniform(0.5, 2, d), jnp.float32) for _ in range(2)]
    angle = rng.uniform(0, 6, (tokens, d // 2))
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    given = weights if normed else [None, None]
    *got, values = turn(
        jnp.asarray(projected), heads, kv_heads, *given, cos, sin, eps=1e-6, version=version
    )
    x = bf16(projected).reshape(tokens, -1, d)
    q, k, v = np.split(x, (heads, heads + kv_heads), axis=1)
    np.testing.assert_array_equal(np.asarray(values, np.float64), v)
    for x, weight, y in zip((q, k), weights, got, strict=True):
        if normed:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
            x = bf16(x)
        a, b = x[..., : d // 2], x[..., d // 2 :]
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        want = np.concatenate([a * c - b * s, b * c + a * s], -1)
        error = np.abs(np.asarray(y, np.float64) - want)
        # A BF16 step of the result, and one of the normed value where it fell the other way.
        size = np.maximum(np.abs(want), np.tile(np.hypot(a, b), 2))
        assert (error <= size * 2.0**-8 + 1e-6).all()
        assert error.mean() <= 0.25 * np.abs(want).mean() * 2.0**-7


# --- refusals ---


def test_a_named_version_that_cannot_run_says_why():
    x = rows(8, 64)
    with pytest.raises(ValueError, match="fake_quantize: version 'hopper' cannot run"):
        fake_quantize_rows(x, fp4.MXFP4, version="hopper")
    with pytest.raises(ValueError, match="up to 512 experts"):
        choose_experts(jnp.zeros((1, 1, 1024)), 4, normalize=True, version="hopper")
    turns = jnp.ones((1, 48))
    with pytest.raises(ValueError, match="heads of 64, 128 or 256, not 96"):
        norm_rotary(jnp.ones((1, 384)), 2, 1, None, None, turns, turns, eps=0, version="hopper")
