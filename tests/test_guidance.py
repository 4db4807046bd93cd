"""Guidance: packing, and the two sides of a site under noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import fp4
from trace_jax.fp4 import MXFP4, NVFP4, NVFP4_4OVER6, GuidancePlan, Guide, formats

POW2 = NVFP4.replace(outer="pow2")
FOUR_OVER_SIX = NVFP4_4OVER6.replace(outer="pow2")


# --- packing ---------------------------------------------------------------------------------


def test_mantissa_bits_are_packed_eight_a_byte_low_bit_first():
    codes = jnp.uint8([1, 0, 3, 9, 8, 0, 0, 7, 5, 2])
    stored = fp4.compact(codes, jnp.uint8([0x7E]), GuidancePlan())
    np.testing.assert_array_equal(stored.bits, [0b10001101, 0b1])
    np.testing.assert_array_equal(stored.scales, [0x7E])


def test_low_scale_bits_are_packed_four_a_byte_low_bits_first():
    scales = jnp.uint8([0x7D, 0x02, 0x03, 0x04, 0x42])
    stored = fp4.compact(jnp.zeros(80, jnp.uint8), scales, GuidancePlan(bits=0, scale_bits=2))
    assert stored.bits is None
    np.testing.assert_array_equal(stored.scales, [0b00111001, 0b10])


@pytest.mark.parametrize("width", [1, 7, 8, 13, 77, 256])
@pytest.mark.parametrize("bits", [0, 1, 4])
@pytest.mark.parametrize("scale_bits", [1, 2, 8])
def test_hints_undo_compact_for_any_width(width, bits, scale_bits):
    rng = np.random.default_rng(width)
    codes = rng.integers(0, 16, (3, width), dtype=np.uint8)
    scales = rng.integers(1, 127, (3, formats.num_blocks(width, NVFP4)), dtype=np.uint8)
    plan = GuidancePlan(bits=bits, scale_bits=scale_bits)
    stored = fp4.compact(jnp.asarray(codes), jnp.asarray(scales), plan)
    hints = fp4.guidance.hints(stored, plan, width)
    if bits == 0:
        assert hints is None and stored.bits is None
    else:
        np.testing.assert_array_equal(hints, codes & (1 if bits == 1 else 15))
        assert stored.bits.shape == (3, -(-width * bits // 8))
    assert stored.scales.shape == (3, -(-scales.shape[1] * scale_bits // 8))


# --- the two sides of a site ------------------------------------------------------------------

WIDTH = 77  # no multiple of 2, 8, 16 or 32


@functools.partial(jax.jit, static_argnums=(2, 3))
def sides(rollout_x, trainer_x, plan, fmt, obey, guard=None):
    """(rollout's outcome, trainer's under its guidance, trainer's alone)."""
    rollout = fp4.quantize_site(rollout_x, fmt)
    stored = fp4.compact(rollout.codes, rollout.scale_bytes, plan)
    guide = Guide(stored, plan, obey, guard)
    return rollout, fp4.quantize_site(trainer_x, fmt, guide), fp4.quantize_site(trainer_x, fmt)


def run(rollout_x, trainer_x, plan, fmt=POW2, obey=True, guard=None):
    rows = len(rollout_x)
    obey = np.broadcast_to(obey, rows)
    guard = None if guard is None else np.full(rows, guard, np.float32)
    return sides(rollout_x, trainer_x, plan, fmt, obey, guard)


def scales_of(site, fmt):
    """Block scales with the outer scale, which is what rounding sees."""
    return np.asarray(formats.decode_scale(site.scale_bytes, fmt)) * np.asarray(site.outer)


def values_of(site):
    return np.asarray(site.value, np.float32)


def noisy_pair(noise, rows=512, seed=0):
    """Heavy-tailed rows, and the same with relative noise."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, WIDTH)) * np.exp(0.5 * rng.standard_normal((rows, WIDTH)))
    other = x * (1 + noise * rng.standard_normal(x.shape))
    return np.float32(other), np.float32(x)


def crossing_pair(rows=512, seed=1):
    """Rows whose maximum lies just above a binade of the outer scale for the rollout and
    just below it for the trainer (first half), and the other way round (second half)."""
    _, x = noisy_pair(0, rows, seed)
    x = x / np.abs(x).max(axis=1, keepdims=True) * 2688 * 2.0**-12
    side = np.where(np.arange(rows) < rows // 2, 1.006, 0.994)[:, None]
    return np.float32(x * side), np.float32(x / side)


PLANS = {
    "scales": GuidancePlan(bits=0),
    "one_bit": GuidancePlan(),
    "four_bit": GuidancePlan(bits=4),
    "replay": GuidancePlan(bits=4, rounding="replay"),
    "one_bit_2bit_scales": GuidancePlan(scale_bits=2),
    "one_bit_1bit_scales": GuidancePlan(scale_bits=1),
}


@pytest.mark.parametrize(
    ("plan", "fmt"),
    [(plan, fmt) for plan in PLANS.values() for fmt in (POW2, MXFP4)]
    + [(plan, FOUR_OVER_SIX) for plan in PLANS.values() if plan.scale_bits == 8],
    ids=lambda a: a.name if hasattr(a, "name") else f"{a.mode}_{a.bits}_{a.scale_bits}",
)
def test_without_noise_the_trainer_reproduces_the_rollout_exactly(plan, fmt):
    x, _ = noisy_pair(0)
    rollout, trainer, alone = run(x, x, plan, fmt)
    for site in (trainer, alone):
        np.testing.assert_array_equal(site.codes, rollout.codes)
        np.testing.assert_array_equal(values_of(site), values_of(rollout))


@pytest.mark.parametrize("fmt", [POW2, FOUR_OVER_SIX, MXFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
def test_8_bit_scales_are_the_rollouts_under_noise(noise, fmt):
    rollout, trainer, _ = run(*noisy_pair(noise), PLANS["one_bit"], fmt)
    np.testing.assert_array_equal(trainer.scale_bytes, rollout.scale_bytes)
    np.testing.assert_array_equal(trainer.outer, rollout.outer)


@pytest.mark.parametrize("fmt", [POW2, FOUR_OVER_SIX], ids=lambda f: f.name)
def test_8_bit_scales_name_the_rollouts_outer_scale_across_a_binade(fmt):
    rollout_x, trainer_x = crossing_pair()
    if fmt is FOUR_OVER_SIX:  # its binades lie at 1536 times a power of two
        rollout_x, trainer_x = (np.float32(x * 1536 / 2688) for x in (rollout_x, trainer_x))
    rollout, trainer, alone = run(rollout_x, trainer_x, PLANS["one_bit"], fmt)
    ratio = np.asarray(alone.outer / rollout.outer)[:, 0]
    np.testing.assert_array_equal(np.unique(ratio), [0.5, 2.0])
    np.testing.assert_array_equal(trainer.outer, rollout.outer)
    assert (np.asarray(trainer.codes) == rollout.codes).mean() == 1.0
    np.testing.assert_array_equal(values_of(trainer), values_of(rollout))


def test_2_bit_scales_are_refused_for_4_over_6():
    """Its two scales lie 4 or 5 bytes apart: 7 % would be wrong at 1 % noise."""
    with pytest.raises(
        ValueError, match="2 bits cannot tell .* 4-over-6 apart; write scale_bits=8"
    ):
        run(*noisy_pair(0.01), PLANS["one_bit_2bit_scales"], FOUR_OVER_SIX)


@pytest.mark.parametrize(
    ("bits", "noise", "wrong"),
    [(2, 0.0, 0), (2, 0.01, 0), (2, 0.03, 1e-4), (1, 0.0, 0), (1, 0.01, 0), (1, 0.03, 0.04)],
)
def test_low_scale_bits_recover_the_rollouts_scale_under_noise(bits, noise, wrong):
    plan = PLANS[f"one_bit_{bits}bit_scales"]
    rollout, trainer, alone = run(*noisy_pair(noise, rows=4096), plan)
    off = scales_of(trainer, POW2) != scales_of(rollout, POW2)
    assert off.mean() <= wrong
    if noise:
        assert (scales_of(alone, POW2) != scales_of(rollout, POW2)).mean() > 0.05


@pytest.mark.parametrize("bits", [1, 2])
def test_low_scale_bits_survive_a_crossed_binade(bits):
    """The trainer keeps its own outer scale: a factor of 2 is 8 bytes, which low bits absorb."""
    rollout, trainer, alone = run(*crossing_pair(), PLANS[f"one_bit_{bits}bit_scales"])
    assert (np.asarray(alone.outer) != rollout.outer).all()
    np.testing.assert_array_equal(scales_of(trainer, POW2), scales_of(rollout, POW2))
    np.testing.assert_array_equal(values_of(trainer), values_of(rollout))


@pytest.mark.parametrize("fmt", [POW2, MXFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("name", ["one_bit", "four_bit", "replay", "one_bit_1bit_scales"])
def test_at_1_percent_noise_guided_codes_are_the_rollouts_and_own_ones_are_not(name, fmt):
    rollout, trainer, alone = run(*noisy_pair(0.01), PLANS[name], fmt)
    np.testing.assert_array_equal(trainer.codes, rollout.codes)
    np.testing.assert_array_equal(values_of(trainer), values_of(rollout))
    assert (np.asarray(alone.codes) == rollout.codes).mean() < 0.98


def test_scales_alone_leave_the_codes_to_nearest_rounding():
    rollout_x, trainer_x = noisy_pair(0.01)
    rollout, trainer, _ = run(rollout_x, trainer_x, PLANS["scales"])
    agreement = (np.asarray(trainer.codes) == rollout.codes).mean()
    assert 0.95 < agreement < 1.0
    scale = np.repeat(scales_of(rollout, POW2), 16, axis=1)[:, :WIDTH]
    x = np.asarray(jnp.asarray(trainer_x, jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(trainer.codes, formats.encode_e2m1(jnp.asarray(x / scale)))


def test_replay_gives_the_rollouts_values_even_for_unrelated_ones():
    rollout_x, _ = noisy_pair(0)
    trainer_x = rollout_x[::-1] * 1.0
    # The outer scale is told from the own maximum, so that has to be alike.
    trainer_x *= np.abs(rollout_x).max(axis=1, keepdims=True) / np.abs(trainer_x).max(
        axis=1, keepdims=True
    )
    rollout, trainer, _ = run(rollout_x, np.float32(trainer_x), PLANS["replay"])
    np.testing.assert_array_equal(values_of(trainer), values_of(rollout))


def test_four_bits_stay_closer_to_the_rollout_than_one_bit_under_heavy_drift():
    pair = noisy_pair(0.1)
    gaps = {}
    for name in ("scales", "one_bit", "four_bit", "replay"):
        rollout, trainer, _ = run(*pair, PLANS[name])
        gaps[name] = np.abs(values_of(trainer) - values_of(rollout)).mean()
    assert gaps["replay"] == 0 < gaps["four_bit"] < gaps["one_bit"]
    assert gaps["four_bit"] < gaps["scales"]


# --- obey and guard ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_rows_that_do_not_obey_are_rounded_to_nearest_on_their_own_scales(name):
    """Not recorded is a state of its own, never a zero bit or a zero scale."""
    obey = np.arange(512) % 2 == 0
    rollout, trainer, alone = run(*noisy_pair(0.03), PLANS[name], obey=obey)
    for ours, own in zip(trainer, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(ours)[1::2], np.asarray(own)[1::2])
    guided = np.asarray(trainer.codes)[0::2]
    assert (guided == np.asarray(rollout.codes)[0::2]).mean() > (
        np.asarray(alone.codes)[0::2] == np.asarray(rollout.codes)[0::2]
    ).mean()


def test_the_guard_of_a_row_limits_where_its_bits_are_obeyed():
    pair = noisy_pair(0.03)
    agreement = {}
    for guard in (1e-6, 0.05, 0.5):
        rollout, trainer, _ = run(*pair, PLANS["one_bit"], guard=guard)
        agreement[guard] = (np.asarray(trainer.codes) == rollout.codes).mean()
    _, nearest, _ = run(*pair, PLANS["scales"])
    assert agreement[1e-6] < 0.99 < agreement[0.5]
    assert agreement[1e-6] < agreement[0.05] < agreement[0.5]
    assert abs(agreement[1e-6] - (np.asarray(nearest.codes) == rollout.codes).mean()) < 0.005


# --- bad values, zeros, gradients ----------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["one_bit", "replay", "one_bit_2bit_scales"])
@pytest.mark.parametrize("fmt", [POW2, MXFP4], ids=lambda f: f.name)
def test_a_bad_value_of_the_trainer_is_seen_on_the_rollouts_scales(bad, name, fmt):
    """BR-006: the received scale is a clean number, so only the value itself can show it."""
    x, _ = noisy_pair(0)
    broken = x.copy()
    broken[3, 5] = bad
    _, trainer, alone = run(x, broken, PLANS[name], fmt)
    for site in (trainer, alone):
        value = values_of(site)
        assert np.isnan(value[3]).all()
        assert np.isfinite(np.delete(value, 3, axis=0)).all()


def test_a_bad_value_of_the_rollout_is_seen_by_the_trainer():
    x, _ = noisy_pair(0)
    broken = x.copy()
    broken[3, 5] = np.nan
    rollout, trainer, _ = run(broken, x, PLANS["one_bit"])
    for site in (rollout, trainer):
        assert np.isnan(values_of(site)[3]).all()
        assert np.isfinite(np.delete(values_of(site), 3, axis=0)).all()


@pytest.mark.parametrize("name", ["one_bit", "one_bit_2bit_scales"])
def test_zero_and_tiny_rows_stay_finite_under_guidance(name):
    x, _ = noisy_pair(0)
    x[0], x[1] = 0, x[1] * 1e-36
    rollout, trainer, _ = run(x, x, PLANS[name])
    assert np.count_nonzero(values_of(trainer)[0]) == 0
    np.testing.assert_array_equal(values_of(trainer), values_of(rollout))


@pytest.mark.parametrize("zero", [False, True])
def test_the_gradient_of_a_guided_site_is_straight_through(zero):
    """Also for a row of zeros, whose outer scale is so small that g * outer underflows."""
    rollout_x, trainer_x = noisy_pair(0.03)
    trainer_x = trainer_x * 0 if zero else trainer_x
    x, g = (jnp.asarray(a, jnp.bfloat16) for a in (trainer_x, rollout_x * 1e-3))

    @jax.jit
    def pulled(x, g):
        def value(x):
            rollout = fp4.quantize_site(jnp.asarray(rollout_x), POW2)
            stored = fp4.compact(rollout.codes, rollout.scale_bytes, PLANS["one_bit"])
            guide = Guide(stored, PLANS["one_bit"], jnp.ones(len(rollout_x), bool))
            return fp4.quantize_site(x, POW2, guide).value

        return jax.vjp(value, x)[1](g)[0]

    np.testing.assert_array_equal(pulled(x, g).astype(jnp.float32), g.astype(jnp.float32))


# --- a second pass over the errors (QUADS) ---------------------------------------------


def test_a_second_pass_quantizes_the_larger_half_of_the_errors():
    """arXiv 2607.15810: the first pass stays, half of the values gain another."""
    x = jax.random.normal(jax.random.key(3), (4, 32)).astype(jnp.bfloat16)
    two = fp4.quantize_site(x, POW2.replace(residual=0.5))
    one = fp4.quantize_site(x, POW2)
    np.testing.assert_array_equal(two.codes, one.codes)
    first, both = (np.asarray(q.value, np.float32) for q in (one, two))
    error = np.asarray(x, np.float32) - first
    for row in range(4):
        larger = np.argsort(-np.abs(error[row]))[:16]
        kept = np.setdiff1d(np.arange(32), larger)
        np.testing.assert_array_equal(both[row, kept], first[row, kept])
        left = np.abs(np.asarray(x, np.float32) - both)[row, larger]
        # A block's step is at most a sixth of its largest error (2 of 6 in the last binade,
        # half of it after rounding), so nothing that had a pass keeps more than that.
        assert 0 < left.max() <= np.abs(error[row, larger]).max() / 5
        chosen = jnp.zeros(32).at[larger].set(error[row, larger])
        second = np.asarray(fp4.quantize_site(chosen, POW2).value, np.float32)
        np.testing.assert_array_equal(both[row, larger], np.asarray(
            jnp.asarray(first[row] + second).astype(jnp.bfloat16), np.float32)[larger])


def test_a_second_pass_of_a_row_does_not_depend_on_its_neighbours():
    x = jax.random.normal(jax.random.key(4), (3, 32)).astype(jnp.bfloat16)
    fmt = POW2.replace(residual=0.5)
    np.testing.assert_array_equal(
        fp4.quantize_site(x, fmt).value[1], fp4.quantize_site(x[1:2] , fmt).value[0]
    )
