"""Codes, scales, packing and block layout, against oracles that are not ours.

The oracles: ml_dtypes (float4_e2m1fn, float8_e4m3fn, float8_e8m0fnu), JAX's own
bitcast of float4, and the plain NumPy codec at the top of this file.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trace_jax import fp4
from trace_jax.fp4 import MXFP4, NVFP4, NVFP4_4OVER6, formats

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDPOINTS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
ALL_CODES = np.arange(16, dtype=np.uint8)
ALL_BYTES = np.arange(256, dtype=np.uint8)
CODE_VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])


def oracle_codes(z):
    """E2M1 codes of float64 z, by distance, ties to the even index."""
    z = np.asarray(z, np.float64)
    distance = np.abs(np.abs(z)[..., None] - MAGNITUDES)
    nearest = distance == distance.min(axis=-1, keepdims=True)
    even_first = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    index = even_first[np.argmax(nearest[..., even_first], axis=-1)]
    return (index + 8 * np.signbit(z)).astype(np.uint8)


encode = jax.jit(formats.encode_e2m1)


def block_scales(u, fmt):
    return formats.block_scales(formats.largest(u), u, fmt)


scales_of = jax.jit(block_scales, static_argnums=1)
quantize = jax.jit(fp4.quantize, static_argnums=1)
fake_quant = jax.jit(fp4.fake_quant, static_argnums=1)


# --- E2M1 --------------------------------------------------------------------------


def test_decode_gives_the_16_values_of_ml_dtypes():
    foreign = ALL_CODES.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    ours = np.asarray(formats.decode_e2m1(jnp.asarray(ALL_CODES)))
    np.testing.assert_array_equal(ours, CODE_VALUES)
    np.testing.assert_array_equal(ours, foreign)
    np.testing.assert_array_equal(np.signbit(ours), np.signbit(foreign))


def test_jitted_bf16_decode_does_not_flush_one_half():
    decoded = jax.jit(lambda c: formats.decode_e2m1(c, jnp.bfloat16))(jnp.asarray(ALL_CODES))
    np.testing.assert_array_equal(np.asarray(decoded, np.float32), CODE_VALUES)


def test_encode_inverts_decode_for_every_code():
    np.testing.assert_array_equal(encode(formats.decode_e2m1(jnp.asarray(ALL_CODES))), ALL_CODES)


def test_every_tie_goes_to_the_even_code_and_its_neighbours_do_not():
    ties = np.float32(MIDPOINTS)
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9))
    np.testing.assert_array_equal(encode(ties), [0, 2, 2, 4, 4, 6, 6])
    np.testing.assert_array_equal(encode(-ties), np.array([0, 2, 2, 4, 4, 6, 6]) + 8)
    np.testing.assert_array_equal(encode(below), np.arange(7))
    np.testing.assert_array_equal(encode(above), np.arange(1, 8))


def test_encode_equals_ml_dtypes_for_every_finite_bf16():
    bits = np.arange(2**16, dtype=np.uint32) << 16
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    foreign = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    np.testing.assert_array_equal(encode(values), foreign)


def test_encode_clips_beyond_six():
    np.testing.assert_array_equal(
        encode(np.float32([6.1, 7, 1e30, -7, -np.inf])), [7, 7, 7, 15, 15]
    )


def test_mantissa_bit_is_0_1_0_1_and_differs_between_neighbours():
    bits = np.asarray(fp4.mantissa_bits(jnp.asarray(ALL_CODES)))
    np.testing.assert_array_equal(bits, [0, 1] * 8)


def test_grid_step_is_the_distance_of_the_bracket():
    inside = np.float32([0.1, 0.6, 1.2, 1.9, 2.1, 3.5, 4.1, 5.9])
    step = [0.5, 0.5, 0.5, 0.5, 1, 1, 2, 2]
    np.testing.assert_array_equal(formats.grid_step(jnp.asarray(inside)), step)


# --- packing ---------------------------------------------------------------------------


def test_pack_puts_the_first_element_in_the_low_nibble():
    """BR-013: golden bytes, not a round trip."""
    codes = encode(np.float32([1, 6, 0, -6]))
    np.testing.assert_array_equal(codes, [2, 7, 0, 15])
    np.testing.assert_array_equal(fp4.pack(codes), [0x72, 0xF0])


def test_a_foreign_reader_sees_the_same_nibble_order():
    """BR-013: XLA's own float4 bitcast reads our bytes."""
    packed = fp4.pack(jnp.asarray(ALL_CODES))
    foreign = jax.lax.bitcast_convert_type(packed, jnp.float4_e2m1fn).reshape(-1)
    np.testing.assert_array_equal(np.asarray(foreign.astype(jnp.float32)), CODE_VALUES)


def test_unpack_inverts_pack_for_all_256_bytes():
    packed = jnp.asarray(ALL_BYTES)
    codes = fp4.unpack(packed)
    np.testing.assert_array_equal(codes[0::2], ALL_BYTES & 15)
    np.testing.assert_array_equal(codes[1::2], ALL_BYTES >> 4)
    np.testing.assert_array_equal(fp4.pack(codes), ALL_BYTES)


def test_pack_refuses_an_odd_length():
    with pytest.raises(ValueError, match="odd length 3"):
        fp4.pack(jnp.zeros((2, 3), jnp.uint8))


# --- scales ------------------------------------------------------------------------------


def test_all_256_e4m3_bytes_decode_as_ml_dtypes_does():
    """BR-002: subnormal scales, signed zero, and NaN only at 0x7F and 0xFF."""
    ours = np.asarray(formats.decode_scale(jnp.asarray(ALL_BYTES), NVFP4))
    np.testing.assert_array_equal(ours, ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert ours[0x01] == 2.0**-9 == 0.001953125
    assert ours[0x80] == 0 and np.signbit(ours[0x80])
    assert np.flatnonzero(np.isnan(ours)).tolist() == [0x7F, 0xFF]


def test_all_256_e8m0_bytes_decode_as_ml_dtypes_does():
    """BR-011: bias 127, so byte 127 is 1."""
    ours = np.asarray(formats.decode_scale(jnp.asarray(ALL_BYTES), MXFP4))
    np.testing.assert_array_equal(ours, ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert ours[127] == 1.0 and ours[0] == 2.0**-127
    assert np.flatnonzero(np.isnan(ours)).tolist() == [255]


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda f: f.name)
def test_code_times_scale_is_exact_in_bf16(fmt):
    scale = np.asarray(formats.decode_scale(jnp.asarray(ALL_BYTES), fmt), np.float64)
    # Up to 2**-126 and 6 * 2**127 the product leaves FP32 itself.
    scale = scale[np.isfinite(scale) & ((scale == 0) | (np.abs(scale) >= 2.0**-125))]
    scale = scale[np.abs(scale) <= 2.0**125]
    product = scale[:, None] * CODE_VALUES
    assert product.size >= 16 * 250
    np.testing.assert_array_equal(product.astype(ml_dtypes.bfloat16).astype(np.float64), product)


def one_block(amax, fmt):
    u = np.zeros((1, fmt.block), np.float32)
    u[0, 3] = amax
    return u


def scale_of(amax, fmt):
    byte = scales_of(one_block(amax, fmt), fmt)
    return float(formats.decode_scale(byte, fmt)[0])


@pytest.mark.parametrize(
    ("rule", "amax", "scale", "decoded"),
    [
        ("floor", 1.0, 0.25, 1.0),  # BR-008
        ("floor", 8.4, 2.0, 8.0),  # BR-008
        ("floor", 7.0, 1.0, 6.0),  # BR-009
        ("ceil", 7.0, 2.0, 8.0),  # BR-009
        ("round_up", 7.0, 2.0, 8.0),  # BR-009
        ("round_up", 6.99, 1.0, 6.0),
        ("ceil", 6.0, 1.0, 6.0),
        ("ceil", 6.0000005, 2.0, 6.0),
    ],
)
def test_each_e8m0_rule_gives_its_own_scale(rule, amax, scale, decoded):
    fmt = MXFP4.replace(scale_rule=rule)
    assert scale_of(amax, fmt) == scale
    value = fake_quant(one_block(amax, fmt), fmt)
    assert float(value[0, 3]) == decoded


@pytest.mark.parametrize("rule", ["floor", "ceil", "round_up"])
def test_e8m0_rules_equal_their_formula_for_every_bf16(rule):
    bits = np.arange(0x0080, 0x7F80, dtype=np.uint32) << 16
    amax = bits.view(np.float32)
    fmt = MXFP4.replace(scale_rule=rule)
    ours = np.asarray(formats.decode_scale(formats._encode_e8m0(jnp.asarray(amax), rule), fmt))
    a = amax.astype(np.float64)
    exponent = {
        "floor": np.floor(np.log2(a)) - 2,
        "ceil": np.ceil(np.log2(a / 6)),
        "round_up": np.floor(np.log2(a * 8 / 7)) - 2,
    }[rule]
    np.testing.assert_array_equal(ours, 2.0 ** np.maximum(exponent, -126))


def test_e4m3_scale_is_the_rounded_quotient_for_every_bf16_maximum():
    """Ties of amax / 6 between two E4M3 numbers go to the even one, as in a true division."""
    bits = np.arange(0x3B00, 0x4528, dtype=np.uint32) << 16
    amax = bits.view(np.float32)
    u = np.zeros((amax.size, 16), np.float32)
    u[:, 0] = amax
    expected = np.clip(amax.astype(np.float64) / 6, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(scales_of(u, NVFP4), expected.view(np.uint8))


def test_no_scale_byte_is_nan_when_one_block_is_zero():
    """BR-001: 0x7F must not appear; the zero block decodes to exact zeros."""
    x = np.zeros((1, 32), np.float32)
    x[0, 16:] = 1.0
    q = quantize(x, NVFP4)
    assert q.block_scale.tolist() == [[1, 0x7E]]
    np.testing.assert_array_equal(fp4.dequantize(q), x)


@pytest.mark.parametrize("big", [449.0, 464.0, 465.0, 1e4, 3e38])
def test_e4m3_scale_saturates_instead_of_becoming_nan(big):
    """BR-001: the bare cast gives NaN above 464."""
    assert scale_of(big * 6 if big < 1e5 else big, NVFP4.replace(outer="none")) == 448.0


@pytest.mark.parametrize(("fmt", "bad"), [(NVFP4, np.nan), (MXFP4, np.nan), (MXFP4, np.inf)])
def test_the_scale_byte_of_a_bad_block_is_nan(fmt, bad):
    """BR-006: the code itself cannot say it."""
    assert np.isnan(scale_of(bad, fmt))


def test_outer_scale_is_amax_over_2688():
    """BR-019: expert 0 with maximum 1, expert 1 with maximum 100."""
    outer = np.asarray(formats.outer_scale(jnp.float32([1, 100]), NVFP4))
    np.testing.assert_array_equal(outer, np.float32([1, 100]) / np.float32(2688))


def test_outer_scale_is_the_same_in_and_out_of_jit():
    """XLA turns division by a constant into a product with its reciprocal, an ulp off."""
    amax = np.random.default_rng(0).uniform(0.1, 10, 4096).astype(np.float32)
    for fmt in (NVFP4, NVFP4_4OVER6):
        exact = amax / np.float32(6 * fmt.top_scale)
        np.testing.assert_array_equal(formats.outer_scale(amax, fmt), exact)
        np.testing.assert_array_equal(
            jax.jit(formats.outer_scale, static_argnums=1)(amax, fmt), exact
        )


def test_power_of_two_outer_is_the_next_one_above():
    fmt = NVFP4.replace(outer="pow2")
    amax = np.float32([2688, 2688.25, 5376, 1.0, 1e-3])
    outer = np.asarray(formats.outer_scale(amax, fmt))
    np.testing.assert_array_equal(outer, 2.0 ** np.ceil(np.log2(amax.astype(np.float64) / 2688)))


def test_outer_scale_of_nothing_is_tiny_not_zero():
    """BR-018: no reciprocal of a never-used expert may be infinite, none may win a maximum."""
    for fmt in (NVFP4, NVFP4.replace(outer="pow2")):
        outer = float(formats.outer_scale(jnp.float32(0), fmt))
        assert 0 < outer < 1e-34 and np.isfinite(np.float32(1) / np.float32(outer))


@pytest.mark.parametrize("fmt", [NVFP4, NVFP4.replace(outer="pow2"), MXFP4], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_outer_scale_of_a_bad_maximum_is_nan(fmt, bad):
    assert np.isnan(formats.outer_scale(jnp.float32(bad), fmt))


# --- 4-over-6 --------------------------------------------------------------------------------


def oracle_four_over_six(u):
    """Bytes chosen by exact squared errors (float64), and the two errors."""
    amax = np.abs(u).max(axis=-1)
    bytes_, errors = [], []
    for top in (6, 4):
        scale = np.clip(amax / top, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
        wide = scale.astype(np.float64)[..., None]
        error = CODE_VALUES[oracle_codes(u / wide)] * wide - u
        bytes_.append(scale.view(np.uint8))
        errors.append((error**2).sum(axis=-1))
    return np.where(errors[1] < errors[0], bytes_[1], bytes_[0]), errors


def test_four_over_six_takes_the_scale_with_the_smaller_error():
    u = np.random.default_rng(1).standard_normal((4096, 16)).astype(np.float32) * 30
    expected, (six, four) = oracle_four_over_six(u.astype(np.float64))
    ours = np.asarray(scales_of(u, NVFP4_4OVER6))
    clear = np.abs(six - four) > 1e-3 * (six + four)
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(ours[clear], expected[clear])
    assert 0.2 < (ours != np.asarray(scales_of(u, NVFP4))).mean() < 0.8


def test_four_over_six_ties_go_to_six():
    u = np.zeros((1, 16), np.float32)
    u[0, :2] = 6.0, 4.0  # exact under 6; under 4 (scale 1.5) also exact: 4 and 2.67
    assert scales_of(u, NVFP4_4OVER6).tolist() == scales_of(u, NVFP4).tolist()
    u[0, :2] = 6.0, 0.0  # exact under both
    assert scales_of(u, NVFP4_4OVER6).tolist() == scales_of(u, NVFP4).tolist()


def near_tie_blocks():
    """Blocks whose two errors differ in the last bits only."""
    rng = np.random.default_rng(2)
    u = rng.standard_normal((1 << 15, 16)).astype(np.float32) * 30
    _, (six, four) = oracle_four_over_six(u.astype(np.float64))
    return u[np.argsort(np.abs(six - four) / (six + four))[:64]]


def test_four_over_six_near_ties_fall_alike_in_every_program():
    """BR-022: permuted blocks have the same error, so they must get the same scale."""
    u = near_tie_blocks()
    first = np.asarray(scales_of(u, NVFP4_4OVER6))
    rng = np.random.default_rng(3)
    for _ in range(16):
        shuffled = rng.permuted(u, axis=-1)
        np.testing.assert_array_equal(scales_of(shuffled, NVFP4_4OVER6), first)
    one_by_one = jax.lax.map(lambda row: block_scales(row, NVFP4_4OVER6), jnp.asarray(u))
    np.testing.assert_array_equal(one_by_one, first)


# --- blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "nv", "mx"), [(1, 1, 1), (16, 1, 1), (72, 5, 3), (514, 33, 17), (2880, 180, 90)]
)
def test_block_count_rounds_up(n, nv, mx):
    """BR-030: one formula for allocation and stride, also for head sizes 72 and 514."""
    assert (formats.num_blocks(n, NVFP4), formats.num_blocks(n, MXFP4)) == (nv, mx)
    stored = jax.eval_shape(lambda x: fp4.quantize(x, NVFP4), jnp.ones((2, n)))
    assert stored.block_scale.shape == (2, nv) and stored.packed.shape == (2, 8 * nv)


@pytest.mark.parametrize("n", [1, 31, 32, 40])
def test_from_blocks_undoes_to_blocks_and_the_padding_is_zero(n):
    x = np.arange(1, 3 * n + 1, dtype=np.float32).reshape(3, n)
    blocks = np.asarray(formats.to_blocks(jnp.asarray(x), MXFP4))
    assert blocks.shape == (3, -(-n // 32), 32)
    np.testing.assert_array_equal(formats.from_blocks(blocks, n), x)
    assert blocks.sum() == x.sum()


# --- formats as data -----------------------------------------------------------------------------


def test_unknown_format_names_the_known_ones():
    with pytest.raises(ValueError, match="write one of nvfp4, mxfp4, nvfp4_4over6"):
        fp4.format_named("nvfp5")
    assert fp4.format_named("mxfp4") is MXFP4


def test_a_scale_rule_of_the_other_scale_type_is_refused():
    with pytest.raises(ValueError, match="write one of six, four_over_six"):
        NVFP4.replace(scale_rule="floor")
    with pytest.raises(ValueError, match="no outer scale"):
        MXFP4.replace(outer="amax")


def test_codes_are_those_of_the_exact_quotient_not_of_a_rounded_one():
    scale = np.float32([[0.4375, 3.25, 448.0]])  # scales of four significant bits
    midpoints = np.float32(formats.MIDPOINTS)[:, None] * scale
    tie = np.asarray(formats.encode_e2m1(jnp.asarray(midpoints), scale))
    above = np.asarray(formats.encode_e2m1(jnp.asarray(np.nextafter(midpoints, 1e9)), scale))
    below = np.asarray(formats.encode_e2m1(jnp.asarray(np.nextafter(midpoints, -1)), scale))
    index = np.arange(7)[:, None]
    np.testing.assert_array_equal(tie, np.broadcast_to(index + index % 2, tie.shape))
    np.testing.assert_array_equal(above, np.broadcast_to(index + 1, tie.shape))
    np.testing.assert_array_equal(below, np.broadcast_to(index, tie.shape))


def test_scale_bytes_and_outer_scales_do_not_hang_on_how_the_machine_divides(monkeypatch):
    amax = np.float32(np.arange(1, 2**12)) * np.float32(2.0**-5)
    u = jnp.asarray(np.stack([amax, np.zeros_like(amax)], -1))  # ties of amax / 6 among them
    pow2 = NVFP4.replace(outer="pow2")
    exact = np.asarray(block_scales(u, NVFP4))
    outer = np.asarray(formats.outer_scale(jnp.asarray(amax * 21 * 2.0**9), pow2))
    encode = formats._encode_e4m3
    for ulp in (1 - 2.0**-22, 1 + 2.0**-22):
        off = np.float32(ulp)
        monkeypatch.setattr(formats, "_encode_e4m3", lambda raw, off=off: encode(raw * off))
        monkeypatch.setattr(formats, "divide", lambda x, y, off=off: x / y * off)
        np.testing.assert_array_equal(block_scales(u, NVFP4), exact)
        np.testing.assert_array_equal(
            formats.outer_scale(jnp.asarray(amax * 21 * 2.0**9), pow2), outer
        )
