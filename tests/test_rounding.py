"""The rounding primitive: ties, the guided rules and their theorems, guards, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax import fp4
from trace_jax.fp4 import MXFP4, NEAREST, NVFP4, Rounding, formats

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([GRID, -GRID])
ONE_BIT, FOUR_BIT, REPLAY = Rounding("one_bit"), Rounding("four_bit"), Rounding("replay")

round_codes = jax.jit(
    lambda spec, z, *hints: fp4.round_codes(spec, z, np.float32(1), *hints), static_argnums=0
)
fp4_round = jax.jit(fp4.fp4_round, static_argnums=0)
guided = jax.jit(fp4.guided_round)


def nearest_codes(z):
    return np.asarray(round_codes(NEAREST, np.float32(z)))


def bracket(z):
    """Indices of the magnitudes around |z| (equal where |z| is a codeword), by search."""
    magnitude = np.minimum(np.abs(z), 6)
    high = np.searchsorted(GRID, magnitude, side="left")
    return np.where(GRID[high] == magnitude, high, high - 1), high


# 97 values of z between and on the codewords, on both sides of zero, beyond 6 too.
DENSE_Z = np.float32(np.concatenate([np.linspace(-7, 7, 113), VALUES]))


def pairs():
    """Every dense z beside every rollout code."""
    z = np.repeat(DENSE_Z[:, None], 16, axis=1)
    return z, np.tile(np.arange(16, dtype=np.uint8), (len(z), 1))


# --- nearest -----------------------------------------------------------------------


def test_nearest_rounds_ties_to_the_even_code():
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    np.testing.assert_array_equal(nearest_codes(ties), [0, 2, 2, 4, 4, 6, 6])
    np.testing.assert_array_equal(nearest_codes(-ties), [8, 10, 10, 12, 12, 14, 14])


def test_unknown_mode_is_an_error():
    with pytest.raises(ValueError, match="unknown rounding mode 'up'"):
        fp4.round_codes(Rounding("up"), jnp.zeros(3), jnp.ones(3))


# --- stochastic ---------------------------------------------------------------------


@pytest.mark.parametrize("z", [2.4, -2.4, 0.1, 5.5, 3.75, 6.0, 1.5])
def test_stochastic_rounding_has_the_value_as_its_mean(z):
    """2.4 averages 2.4: a float cast would ignore the noise and give 2."""
    n = 1 << 16
    uniform = (np.arange(n, dtype=np.float32) + 0.5) / n
    codes = round_codes(Rounding("stochastic"), np.full(n, z, np.float32), uniform)
    values = VALUES[np.asarray(codes)]
    low, high = bracket(np.float32(z))
    assert set(np.abs(values)) == {GRID[low], GRID[high]}
    assert abs(values.mean() - z) < 1e-4


def test_stochastic_noise_of_zero_rounds_up_and_of_almost_one_down():
    z = np.float32([2.4, -2.4, 2.0, 0.0, 7.0])
    up = round_codes(Rounding("stochastic"), z, np.zeros(5, np.float32))
    down = round_codes(Rounding("stochastic"), z, np.full(5, 1 - 2.0**-24, np.float32))
    np.testing.assert_array_equal(VALUES[up], [3, -3, 2, 0, 6])
    np.testing.assert_array_equal(VALUES[down], [2, -2, 2, 0, 6])


# --- one bit and four bits ------------------------------------------------------------------


def test_one_bit_gives_the_rollouts_code_whenever_it_is_one_of_the_two_neighbours():
    """The theorem of method section 2, for every z on a dense grid and every neighbour."""
    low, high = bracket(DENSE_Z)
    sign = 8 * np.signbit(DENSE_Z)
    for neighbour in (low, high):
        rollout = (neighbour + sign).astype(np.uint8)
        ours = round_codes(ONE_BIT, DENSE_Z, rollout & np.uint8(1))
        np.testing.assert_array_equal(ours, rollout)


def test_guided_codes_are_always_one_of_the_two_neighbours():
    z, rollout = pairs()
    low, high = bracket(z)
    for spec, hint in ((ONE_BIT, rollout & 1), (FOUR_BIT, rollout)):
        ours = np.asarray(round_codes(spec, z, hint))
        assert (((ours & 7) == low) | ((ours & 7) == high)).all()
        np.testing.assert_array_equal(ours >> 3, np.signbit(z))


def test_four_bits_are_never_further_from_the_rollout_than_nearest_rounding():
    z, rollout = pairs()
    ours = VALUES[np.asarray(round_codes(FOUR_BIT, z, rollout))]
    gap, nearest_gap = (
        np.abs(ours - VALUES[rollout]),
        np.abs(VALUES[nearest_codes(z)] - VALUES[rollout]),
    )
    assert (gap <= nearest_gap).all()
    assert (gap < nearest_gap).sum() > 100


def test_four_bits_take_the_bracket_end_nearest_to_the_rollout():
    z, rollout = pairs()
    low, high = bracket(z)
    ends = np.where(np.signbit(z), -1, 1) * np.stack([GRID[low], GRID[high]])
    best = np.abs(ends - VALUES[rollout]).min(axis=0)
    ours = VALUES[np.asarray(round_codes(FOUR_BIT, z, rollout))]
    np.testing.assert_array_equal(np.abs(ours - VALUES[rollout]), best)


@pytest.mark.parametrize("spec", [ONE_BIT, FOUR_BIT], ids=lambda s: s.mode)
def test_a_z_that_is_a_codeword_stays_whatever_the_hint(spec):
    codes = np.arange(16, dtype=np.uint8)
    z = np.repeat(VALUES[:, None], 16, axis=1)
    hint = np.tile(codes, (16, 1)) & (1 if spec is ONE_BIT else 15)
    expected = np.repeat(codes[:, None], 16, axis=1)
    np.testing.assert_array_equal(round_codes(spec, z, hint.astype(np.uint8)), expected)


@pytest.mark.parametrize("spec", [ONE_BIT, FOUR_BIT], ids=lambda s: s.mode)
def test_values_beyond_six_are_clipped_before_the_hint_counts(spec):
    z = np.float32([6.5, 100, -7])
    np.testing.assert_array_equal(round_codes(spec, z, np.zeros(3, np.uint8)), [7, 7, 15])


def test_replay_is_the_rollouts_code_whatever_the_own_value():
    z, rollout = pairs()
    np.testing.assert_array_equal(round_codes(REPLAY, z, rollout), rollout)


# --- guard and obey ----------------------------------------------------------------------


@pytest.mark.parametrize("guard", [0.05, 0.25, 0.4])
@pytest.mark.parametrize("spec", [ONE_BIT, FOUR_BIT], ids=lambda s: s.mode)
def test_the_guard_obeys_near_the_midpoint_and_rounds_to_nearest_elsewhere(spec, guard):
    z = np.linspace(-5.9, 5.9, 2001, dtype=np.float32)
    low, high = bracket(z)
    step, middle = GRID[high] - GRID[low], (GRID[high] + GRID[low]) / 2
    other = np.where((nearest_codes(z) & 7) == low, high, low)  # the side nearest would not take
    rollout = (other + 8 * np.signbit(z)).astype(np.uint8)
    hint = rollout & np.uint8(1 if spec is ONE_BIT else 15)
    ours = np.asarray(round_codes(spec, z, hint, np.float32(guard)))
    distance = np.abs(np.abs(z) - middle) / np.maximum(step, 0.5)
    between = low != high
    inside, outside = between & (distance < guard - 1e-3), between & (distance > guard + 1e-3)
    assert inside.sum() > 100 and outside.sum() > 100
    np.testing.assert_array_equal(ours[inside], rollout[inside])
    np.testing.assert_array_equal(ours[~between | outside], nearest_codes(z)[~between | outside])


@pytest.mark.parametrize("spec", [ONE_BIT, FOUR_BIT], ids=lambda s: s.mode)
def test_a_guard_of_half_a_step_is_no_guard(spec):
    z, rollout = pairs()
    hint = rollout & np.uint8(1 if spec is ONE_BIT else 15)
    wide = round_codes(spec, z, hint, np.float32(0.5))
    np.testing.assert_array_equal(wide, round_codes(spec, z, hint))


@pytest.mark.parametrize("spec", [ONE_BIT, FOUR_BIT, REPLAY], ids=lambda s: s.mode)
def test_where_obey_is_false_the_hint_is_ignored(spec):
    z, rollout = pairs()
    obey = np.arange(len(z))[:, None] % 2 == 0
    hint = rollout & np.uint8(1 if spec is ONE_BIT else 15)
    ours = np.asarray(round_codes(spec, z, hint, None, obey))
    np.testing.assert_array_equal(ours[1::2], nearest_codes(z)[1::2])
    np.testing.assert_array_equal(ours[0::2], np.asarray(round_codes(spec, z, hint))[0::2])


# --- the primitive ------------------------------------------------------------------------


SCALES = np.float32([0.25, 1.0, 1.125, 1.75, 448, 2.0**-9])


def test_values_are_scale_times_codeword():
    z = np.linspace(-6.5, 6.5, 96, dtype=np.float32).reshape(6, 16)
    value, codes = fp4_round(NEAREST, z * SCALES[:, None], SCALES[:, None])
    np.testing.assert_array_equal(value, VALUES[np.asarray(codes)] * SCALES[:, None])


def test_a_nan_or_infinite_value_is_not_hidden_by_the_rollouts_scale():
    """BR-006: with a received scale nothing else could show it."""
    x = np.float32([[np.nan, np.inf, -np.inf, 1.0]])
    for spec in (NEAREST, ONE_BIT, FOUR_BIT, REPLAY):
        hint = None if spec is NEAREST else np.zeros((1, 4), np.uint8)
        value, _ = fp4_round(spec, x, np.float32([[1.0]]), hint)
        assert np.isnan(value[0, :3]).all() and np.isfinite(value[0, 3])


def test_a_nan_scale_gives_nan_values():
    value, _ = fp4_round(NEAREST, np.ones((1, 4), np.float32), np.float32([[np.nan]]))
    assert np.isnan(value).all()


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(spec, x, scale, hint, g):
    (value, _), pull = jax.vjp(lambda x, s: fp4.fp4_round(spec, x, s, hint), x, scale)
    return value, *pull((g, np.zeros(x.shape, jax.dtypes.float0)))


@pytest.mark.parametrize("spec", [NEAREST, ONE_BIT, FOUR_BIT, REPLAY], ids=lambda s: s.mode)
def test_the_gradient_is_ours_straight_through_and_none_goes_to_the_scale(spec):
    """A bare cast would have this gradient too, so the forward must show the mode."""
    x = np.linspace(-8, 8, 64, dtype=np.float32).reshape(4, 16)
    scale, g = np.full((4, 1), 1.0, np.float32), np.float32(np.arange(64).reshape(4, 16) - 20)
    hint = None if spec is NEAREST else np.full((4, 16), 1, np.uint8)
    value, dx, dscale = value_and_gradient(spec, x, scale, hint, g)
    np.testing.assert_array_equal(dx, g)
    assert np.count_nonzero(dscale) == 0
    if spec is not NEAREST:
        assert (np.asarray(value) != VALUES[nearest_codes(x)]).any()


def test_clip_gradient_is_zero_exactly_where_the_forward_clips():
    x = np.float32([[-12.1, -12, -11, 0, 11.9, 12, 12.1, 90]])
    spec, ones = Rounding("nearest", clip_gradient=True), np.ones((1, 8), np.float32)
    _, dx, _ = value_and_gradient(spec, x, np.float32([[2.0]]), None, ones)
    np.testing.assert_array_equal(dx, [[0, 1, 1, 1, 1, 1, 0, 0]])


def test_straight_through_gives_the_gradient_to_x_alone():
    g = jnp.arange(3.0)
    value, pull = jax.vjp(fp4.rounding.straight_through, jnp.ones(3), jnp.full(3, 7.0))
    np.testing.assert_array_equal(value, [7, 7, 7])
    dx, dvalue = pull(g)
    np.testing.assert_array_equal(dx, g)
    assert np.count_nonzero(dvalue) == 0


# --- guided_round -------------------------------------------------------------------------


def test_the_60_24_against_59_76_example_ends_24_apart_without_guidance_and_agrees_with_it():
    """Method section 1: two values around a boundary at scale 24."""
    scale = np.full((1, 1), 24.0, np.float32)
    rollout, trainer = np.full((1, 16), 60.24, np.float32), np.full((1, 16), 59.76, np.float32)
    value, codes = fp4_round(NEAREST, rollout, scale)
    own, _ = fp4_round(NEAREST, trainer, scale)
    np.testing.assert_array_equal(np.asarray(value) - own, 24.0)
    np.testing.assert_array_equal(guided(trainer, scale, fp4.mantissa_bits(codes)), value)


@given(seed=st.integers(0, 2**31), noise=st.sampled_from([0.0, 0.01, 0.03]))
def test_guided_round_agrees_with_the_rollout_within_a_step(seed, noise):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4, 40)).astype(np.float32)
    other = np.float32(x * (1 + noise * rng.standard_normal(x.shape)))
    u = np.pad(x, ((0, 0), (0, 8))).reshape(4, 3, 16)
    scale = np.float32(np.maximum(np.abs(u).max(axis=-1) / 6, 1e-3))
    wide = np.repeat(scale, 16, axis=1)[:, :40]
    rollout = nearest_codes(x / wide)
    ours = np.asarray(guided(other, scale, rollout & np.uint8(1)))
    low, high = bracket(other / wide)
    reachable = (((rollout & 7) == low) | ((rollout & 7) == high)) & (
        np.signbit(x) == np.signbit(other)
    )
    assert reachable.mean() > 0.97
    expected = VALUES[rollout] * wide
    np.testing.assert_array_equal(ours[reachable], expected[reachable])


def test_guided_round_keeps_the_dtype_and_passes_the_gradient():
    x = jnp.asarray(np.linspace(-3, 3, 40).reshape(1, 40), jnp.bfloat16)
    bits, scale = jnp.ones((1, 40), jnp.int32), jnp.ones((1, 2))
    value, pull = jax.vjp(lambda x: fp4.guided_round(x, scale, bits, MXFP4), x)
    assert value.dtype == jnp.bfloat16
    g = jnp.asarray(np.arange(40).reshape(1, 40), jnp.bfloat16)
    np.testing.assert_array_equal(pull(g)[0].astype(jnp.float32), g.astype(jnp.float32))


def test_guided_round_names_the_shape_it_wants():
    x = jnp.ones((2, 40))
    with pytest.raises(ValueError, match=r"block_scale of shape \(2, 3\), not \(2, 2\)"):
        fp4.guided_round(x, jnp.ones((2, 2)), jnp.ones((2, 40), jnp.uint8), NVFP4)
    with pytest.raises(ValueError, match=r"mantissa_bits \(2, 48\) must match x \(2, 40\)"):
        fp4.guided_round(x, jnp.ones((2, 3)), jnp.ones((2, 48), jnp.uint8), NVFP4)


def test_guided_round_with_a_guard_leaves_far_values_alone():
    x = np.full((1, 16), 2.1, np.float32)  # bracket 2..3, 0.4 steps from its middle
    bits = np.ones((1, 16), np.uint8)  # asks for 3
    scale = jnp.ones((1, 1))
    assert float(guided(x, scale, bits)[0, 0]) == 3.0
    assert float(guided(x, scale, bits, guard=0.3)[0, 0]) == 2.0
    assert float(guided(x, scale, bits, guard=0.45)[0, 0]) == 3.0
    assert formats.grid_step(jnp.float32(2.1)) == 1.0
