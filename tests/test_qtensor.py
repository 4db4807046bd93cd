"""Quantized arrays: one codec, exact scaling, error bounds, bad input, gradients."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax import fp4
from trace_jax.fp4 import MXFP4, NVFP4, NVFP4_4OVER6, formats

NVFP4_POW2 = NVFP4.replace(outer="pow2")
FORMATS = (NVFP4, NVFP4_POW2, NVFP4_4OVER6, MXFP4)
each_format = pytest.mark.parametrize(
    "fmt", FORMATS, ids=["nvfp4", "nvfp4_pow2", "nvfp4_4over6", "mxfp4"]
)
STATIC = ("format", "axis", "outer_axes")
quantize = jax.jit(fp4.quantize, static_argnames=STATIC)
fake_quant = jax.jit(fp4.fake_quant, static_argnames=STATIC)
dequantize = jax.jit(fp4.dequantize, static_argnames="dtype")
SHAPE = (64, 160)  # most tests share it, so that each function compiles once a format


def gaussian(shape, sigma=1.0, seed=0, dtype=np.float32):
    return (np.random.default_rng(seed).standard_normal(shape) * sigma).astype(dtype)


def embed(x):
    """A small x in the corner of zeros of the shared shape."""
    x = np.asarray(x, np.float32)
    return np.pad(x, [(0, full - size) for full, size in zip(SHAPE, x.shape, strict=True)])


def assert_same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


# --- a codec in plain NumPy ----------------------------------------------------------

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def oracle_round(z):
    """float64 z to E2M1 values by distance, ties to the even index."""
    z = np.asarray(z, np.float64)
    distance = np.abs(np.abs(z)[..., None] - MAGNITUDES)
    even_first = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    index = even_first[np.argmin(distance[..., even_first], axis=-1)]
    return np.copysign(MAGNITUDES[index], z)


def oracle(x, fmt):
    """(decoded float64, block scales float64, outer float32) of x [rows, n], one outer scale."""
    amax = np.float32(np.abs(x).max())
    outer = np.float32(1)
    if fmt.outer != "none":
        outer = np.float32(amax / np.float32(2688))
    if fmt.outer == "pow2":
        outer = np.float32(2.0 ** np.ceil(np.log2(np.float64(amax) / 2688)))
    u = np.pad((x / outer).astype(np.float32), ((0, 0), (0, -x.shape[1] % fmt.block)))
    u = u.reshape(x.shape[0], -1, fmt.block).astype(np.float64)
    top = np.abs(u).max(axis=-1)
    if fmt.scale_type == "e4m3":
        scale = np.clip(np.float32(top) / np.float32(6), 2.0**-9, 448)
        scale = scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        scale = 2.0 ** (np.floor(np.log2(np.where(top == 0, 1, top))) - 2)
    value = oracle_round(u / scale[..., None]) * scale[..., None]
    return value.reshape(x.shape[0], -1)[:, : x.shape[1]] * np.float64(outer), scale, outer


@pytest.mark.parametrize("fmt", [NVFP4, NVFP4_POW2, MXFP4], ids=str)
@pytest.mark.parametrize("sigma", [1.0, 0.02, 0.001])
def test_codec_equals_the_numpy_codec(fmt, sigma):
    x = gaussian(SHAPE, sigma, seed=1)
    value, scale, outer = oracle(x, fmt)
    q = quantize(x, fmt)
    np.testing.assert_array_equal(dequantize(q), value.astype(np.float32))
    assert np.float32(q.outer).item() == outer
    nonzero = np.asarray(formats.decode_scale(q.block_scale, fmt))
    np.testing.assert_array_equal(nonzero, scale)


def test_ties_of_bf16_values_go_to_even_on_every_scale():
    """x / s must be a true division: as x * (1 / s) one tie in twenty falls to the odd side."""
    scale = np.asarray(formats.decode_scale(jnp.arange(8, 127, dtype=jnp.uint8), NVFP4))
    u = np.zeros((scale.size, 16), np.float32)
    u[:, :7] = scale[:, None] * np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    u[:, 7] = 6 * scale
    q = quantize(u, NVFP4.replace(outer="none"))
    np.testing.assert_array_equal(formats.decode_scale(q.block_scale, NVFP4)[:, 0], scale)
    np.testing.assert_array_equal(q.codes[:, :7], np.tile([0, 2, 2, 4, 4, 6, 6], (scale.size, 1)))


# --- one codec ------------------------------------------------------------------------


SHAPES = [((7,), -1, None), ((3, 40), -1, (1,)), ((2, 48, 5), 1, None)]


@functools.partial(jax.jit, static_argnums=1)
def both_ways(arrays, fmt):
    """(quantize, dequantize of it, fake_quant) of each array, each in its own arrangement."""
    out = []
    for x, (_, axis, outer_axes) in zip(arrays, SHAPES, strict=True):
        q = fp4.quantize(x, fmt, axis=axis, outer_axes=outer_axes)
        fake = fp4.fake_quant(x, fmt, axis=axis, outer_axes=outer_axes)
        out.append((q, fp4.dequantize(q), fake))
    return out


@each_format
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fake_quant_is_dequantize_of_quantize_bit_for_bit(fmt, dtype):
    """BR-024, for every format, dtype, axis and for lengths that are no multiple of a block."""
    arrays = [jnp.asarray(gaussian(shape, 0.02), dtype) for shape, _, _ in SHAPES]
    for (shape, axis, _), (q, real, fake) in zip(SHAPES, both_ways(arrays, fmt), strict=True):
        assert q.shape == shape and q.dtype == dtype and q.axis == axis % len(shape) - len(shape)
        assert float(jnp.abs(real).max()) > 0
        assert_same_bits(fake, real)
        assert_same_bits(fake, dequantize(q))


def test_a_scan_over_rows_stores_the_same_bytes_as_one_call():
    """BR-022: trainer, rollout and exporter compile different programs around one codec."""
    x = jnp.asarray(gaussian(SHAPE, seed=5))
    q = quantize(x, NVFP4_4OVER6, outer_axes=(1,))
    rows = jax.jit(lambda x: jax.lax.map(lambda row: fp4.quantize(row, NVFP4_4OVER6), x))(x)
    for a, b in zip(jax.tree.leaves(q), jax.tree.leaves(rows), strict=True):
        assert_same_bits(a, b)


@each_format
def test_a_site_stores_the_same_codes_as_quantize(fmt):
    """BR-022: an activation's site and a QTensor of the same rows agree."""
    fmt = fmt if fmt is MXFP4 else fmt.replace(outer="pow2")
    x = np.float32(gaussian(SHAPE, seed=6).astype(ml_dtypes.bfloat16))
    site = jax.jit(fp4.quantize_site, static_argnums=1)(x, fmt)
    q = quantize(x, fmt, outer_axes=(1,))
    np.testing.assert_array_equal(site.codes, q.codes)
    np.testing.assert_array_equal(site.scale_bytes, q.block_scale)
    np.testing.assert_array_equal(site.outer, q.outer)
    np.testing.assert_array_equal(site.value.astype(jnp.float32), dequantize(q))


def test_the_axis_argument_moves_the_blocks_and_nothing_else():
    x = gaussian((48, 5), seed=7)
    q, moved = quantize(x, NVFP4, axis=0), quantize(x.T, NVFP4)
    np.testing.assert_array_equal(q.packed, moved.packed)
    np.testing.assert_array_equal(dequantize(q), np.asarray(dequantize(moved)).T)


@each_format
def test_the_stored_scale_is_the_scale_used(fmt):
    """Decoding by hand from the stored bytes gives the values; no other scale fits them."""
    x = gaussian(SHAPE, 0.02, seed=8)
    q = quantize(x, fmt)
    byte = np.asarray(q.block_scale)
    if fmt.scale_type == "e4m3":
        scale = byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        scale = byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    grid = np.concatenate([MAGNITUDES, -MAGNITUDES]).astype(np.float32)
    value = grid[np.asarray(q.codes)] * np.repeat(scale, fmt.block, axis=1) * np.float32(q.outer)
    assert_same_bits(fake_quant(x, fmt), value)
    again = oracle_round(x / np.float32(q.outer) / np.repeat(scale, fmt.block, axis=1))
    assert (again.astype(np.float32) == grid[np.asarray(q.codes)]).mean() > 0.9999


def test_nbytes_counts_what_travels():
    q = jax.eval_shape(lambda x: fp4.quantize(x, NVFP4, outer_axes=(1,)), jnp.ones((3, 40)))
    assert q.nbytes == 3 * (24 + 3 + 4)
    assert jnp.result_type(q.packed) == jnp.uint8 and jnp.result_type(q.block_scale) == jnp.uint8


def test_unscaled_times_outer_is_dequantize_and_is_exact_in_bf16():
    q = quantize(gaussian(SHAPE), NVFP4)
    exact = fp4.unscaled(q, jnp.float32)
    np.testing.assert_array_equal(fp4.unscaled(q).astype(jnp.float32), exact)
    np.testing.assert_array_equal(exact * q.outer, dequantize(q))


# --- scaling and errors -------------------------------------------------------------------


@each_format
def test_powers_of_two_leave_the_codes_and_scale_the_values_exactly(fmt):
    x = gaussian(SHAPE, seed=9)
    codes, values = quantize(x, fmt).codes, np.asarray(fake_quant(x, fmt))
    for exponent in range(-20, 21):
        scaled = x * np.float32(2.0**exponent)
        np.testing.assert_array_equal(quantize(scaled, fmt).codes, codes)
        assert_same_bits(fake_quant(scaled, fmt), values * np.float32(2.0**exponent))


# Relative error sqrt(sum e^2 / sum x^2) and slope of the regression of decoded on original,
# on Gaussian data; the NumPy codec above has the same figures.
BOUNDS = {
    NVFP4: ((0.0930, 0.0960), (0.993, 0.998)),
    NVFP4_POW2: ((0.0930, 0.0960), (0.993, 0.998)),
    NVFP4_4OVER6: ((0.0850, 0.0885), (0.994, 0.999)),
    MXFP4: ((0.1110, 0.1180), (0.974, 0.986)),
}


@each_format
@pytest.mark.parametrize("sigma", [1.0, 0.02, 0.001])
def test_relative_error_and_slope_lie_between_their_bounds(fmt, sigma):
    """Too good is also wrong; and small values fare as well as large ones."""
    x = gaussian(SHAPE, sigma, seed=10).astype(np.float64)
    y = np.asarray(fake_quant(np.float32(x), fmt), np.float64)
    error = np.sqrt(((y - x) ** 2).sum() / (x**2).sum())
    slope = (x * y).sum() / (x**2).sum()
    (low, high), (flat, steep) = BOUNDS[fmt]
    assert low < error < high
    assert flat < slope < steep


@each_format
@given(seed=st.integers(0, 2**31), power=st.integers(-12, 12), cube=st.booleans())
def test_no_value_is_off_by_more_than_half_its_step(fmt, seed, power, cube):
    x = gaussian(SHAPE, 2.0**power, seed)
    x = np.float32(x**3) if cube else x
    q = quantize(x, fmt)
    scale = np.repeat(np.asarray(formats.decode_scale(q.block_scale, fmt)), fmt.block, axis=1)
    scale = scale.astype(np.float64) * np.asarray(q.outer, np.float64)
    z = np.abs(x / scale)
    step = np.where(z < 2, 0.5, np.where(z < 4, 1, 2))
    clipped = np.maximum(
        z - 6, 0
    )  # E4M3 rounds the scale down by 1/16 at most, E8M0 floor clips to 8
    assert clipped.max() < (2 if fmt is MXFP4 else 0.5)
    error = np.abs(np.asarray(dequantize(q), np.float64) - x) / scale
    assert (error <= np.maximum(step / 2, clipped) + 1e-5).all()


# --- where scales end ----------------------------------------------------------------------


@each_format
def test_zero_blocks_and_zero_tensors_decode_to_exact_zeros(fmt):
    """BR-001, BR-016: no NaN scale, no reciprocal of zero."""
    x = np.zeros(SHAPE, np.float32)
    np.testing.assert_array_equal(fake_quant(x, fmt), x)
    x[1, 40] = 1.0
    y = np.asarray(fake_quant(x, fmt))
    # On a power-of-two outer scale 1 / 6 itself is rounded to E4M3: 6 * 0.171875.
    assert y[1, 40] == (1.03125 if fmt is NVFP4_POW2 else 1.0)
    assert np.count_nonzero(y) == 1
    assert not np.isnan(np.asarray(formats.decode_scale(quantize(x, fmt).block_scale, fmt))).any()


@each_format
@pytest.mark.parametrize("tiny", [1e-36, 1e-30, 1e-20])
def test_one_tiny_value_stays_finite_and_zeros_stay_zero(fmt, tiny):
    """BR-016: the reciprocal of the outer scale may not overflow."""
    x = np.zeros(SHAPE, np.float32)
    x[0, 5] = tiny
    y = np.asarray(fake_quant(x, fmt))
    assert np.isfinite(y).all() and np.count_nonzero(y) == 1
    assert abs(y[0, 5] / tiny - 1) < 0.07 if fmt is not MXFP4 else 0.74 < y[0, 5] / tiny <= 1.34


def test_a_small_block_beside_a_large_one_survives_on_the_smallest_scale():
    """BR-004: the floor 2**-9 is the rule, in fake_quant and in the stored form."""
    w = np.zeros(SHAPE, np.float32)
    w[0, 0], w[0, 16] = 1.0, 2e-6
    q = quantize(w, NVFP4)
    assert q.block_scale[0, :2].tolist() == [0x7E, 0x01]
    expected = np.float32(3 * 2.0**-9) * np.float32(1 / 2688)
    assert float(dequantize(q)[0, 16]) == expected and abs(expected - 2.18e-6) < 1e-8
    assert_same_bits(fake_quant(w, NVFP4), dequantize(q))


@each_format
def test_a_block_of_5376_decodes_to_5376(fmt):
    """BR-015: without an outer scale the block scale would need 896."""
    x = embed(np.full((1, 32), 5376.0))
    decoded = float(fake_quant(x, fmt)[0, 0])
    assert decoded == (6144.0 if fmt is MXFP4 else 5376.0)  # E8M0 knows powers of two alone


def test_each_expert_has_its_own_outer_scale():
    """BR-019, BR-018: maxima 1 and 100, and a third expert that is all zero."""
    w = gaussian((3, *SHAPE), seed=11)
    w *= np.array([1, 100, 0]).reshape(3, 1, 1) / np.abs(w).max(axis=(1, 2), keepdims=True)
    w = w.astype(np.float32)
    q = quantize(w, NVFP4, outer_axes=(1, 2))
    amax = np.abs(w).max(axis=(1, 2))
    assert q.outer.shape == (3, 1, 1)
    np.testing.assert_array_equal(q.outer[:2, 0, 0], amax[:2] / np.float32(2688))
    alone = [fake_quant(w[i], NVFP4) for i in range(3)]
    assert_same_bits(dequantize(q), np.stack(alone))
    assert np.count_nonzero(alone[2]) == 0 and float(q.outer.max()) == float(q.outer[1, 0, 0])


def test_a_row_does_not_depend_on_its_batch_neighbours():
    x = gaussian(SHAPE, seed=12)
    louder = x * np.float32([1, 1000] * 32)[:, None]
    a, b = (
        fake_quant(x, NVFP4_POW2, outer_axes=(1,)),
        fake_quant(louder, NVFP4_POW2, outer_axes=(1,)),
    )
    assert_same_bits(a[0::2], b[0::2])


# --- bad input ------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_seen(fmt, bad):
    """BR-006: E2M1 has no code for them, so the scale carries NaN."""
    x = np.ones(SHAPE, np.float32)
    x[1, 3] = bad
    real = np.asarray(dequantize(quantize(x, fmt, outer_axes=(1,))))
    assert np.isnan(real[1]).all() and np.isfinite(real[[0, *range(2, 64)]]).all()
    np.testing.assert_array_equal(fake_quant(x, fmt, outer_axes=(1,)), real)
    assert np.isnan(quantize(x, fmt).outer).all()
    assert np.isnan(fake_quant(x, fmt)[1, 3])


def test_integers_and_scalars_are_refused():
    with pytest.raises(ValueError, match="floating-point arrays, not int32"):
        fp4.quantize(jnp.arange(16), NVFP4)
    with pytest.raises(ValueError, match="at least one axis"):
        fp4.fake_quant(jnp.float32(1), NVFP4)


# --- padding and shards ------------------------------------------------------------------------


@each_format
def test_zero_padding_changes_nothing(fmt):
    """BR-021: neither values nor scales, whatever the length."""
    x = gaussian((3, 70), seed=13)
    short, padded = quantize(x, fmt), quantize(embed(x), fmt)
    blocks = short.block_scale.shape[1]
    np.testing.assert_array_equal(padded.block_scale[:3, :blocks], short.block_scale)
    np.testing.assert_array_equal(padded.outer, short.outer)
    full = np.asarray(dequantize(padded))
    np.testing.assert_array_equal(full[:3, :70], dequantize(short))
    assert np.count_nonzero(full[3:]) == np.count_nonzero(full[:, 70:]) == 0


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=str)
def test_shards_of_720_keep_all_2880_columns(fmt):
    """BR-020: 720 is 22.5 blocks of 32; every shard pads its own end and loses nothing."""
    x = gaussian((2, 2880), seed=14)
    shards = [np.asarray(fake_quant(part, fmt)) for part in np.split(x, 4, axis=1)]
    whole = np.concatenate(shards, axis=1)
    assert whole.shape == x.shape
    error = np.sqrt(((whole - x) ** 2).reshape(2, -1, 48).sum(axis=-1) / 48)
    assert error.max() < 0.2  # a lost column block would have error 1
    assert np.corrcoef(whole[:, 700:720].ravel(), x[:, 700:720].ravel())[0, 1] > 0.97


# --- gradients ------------------------------------------------------------------------------


@jax.jit
def gradient(x, g):
    return jax.tree.map(
        lambda f: jax.vjp(f, x)[1](g)[0],
        [functools.partial(fp4.fake_quant, format=f) for f in FORMATS],
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_is_straight_through_bit_for_bit(dtype):
    x, g = (jnp.asarray(gaussian((8, 40), seed=s), dtype) for s in (15, 16))
    for ours in gradient(x, g):
        assert_same_bits(ours, g)


def test_an_all_zero_tensor_still_gets_its_gradient():
    """x / outer * outer, differentiated, underflows to zero: a dead weight would stay dead."""
    g = jnp.asarray(gaussian((8, 40), 1e-3, seed=17))
    for ours in gradient(jnp.zeros((8, 40)), g):
        assert_same_bits(ours, g)


def test_unscaled_and_outer_pass_the_gradient_through_their_product():
    def product(x):
        value, outer = fp4.fake_quant_unscaled(x, NVFP4)
        return value * outer

    x, g = gaussian((8, 40), seed=15), gaussian((8, 40), seed=16)
    ours = jax.jit(lambda x, g: jax.vjp(product, x)[1](g)[0])(x, g)
    np.testing.assert_allclose(ours, g, rtol=3e-7)


# --- accelerator -------------------------------------------------------------------------------


@pytest.mark.gpu
@each_format
def test_the_gpu_compiles_the_same_bits_as_it_runs_eagerly(fmt):
    """XLA:GPU drops BF16 and float8 cast pairs inside one program."""
    x = jnp.asarray(gaussian((256, 1024), 0.02, seed=18))

    def both(x):
        x = (3 * x).astype(jnp.bfloat16)
        q = fp4.quantize(x, fmt)
        return q, fp4.dequantize(q), fp4.fake_quant(x, fmt)

    q, real, fake = jax.jit(both)(x)
    assert_same_bits(real, fake)
    for a, b in zip(jax.tree.leaves(q), jax.tree.leaves(both(x)[0]), strict=True):
        assert_same_bits(a, b)
