"""Group-relative advantages: values, raggedness and independence of order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from trace_jax.rl.advantages import (
    group_advantages,
    group_stats,
    informative_groups,
)

GROUPS, SAMPLES = 8, 4
ONE_WIN = [1.7320468, -0.5773489, -0.5773489, -0.5773489]  # 0.75 / (sqrt(3) / 4 + 1e-6)
compute = jax.jit(group_advantages, static_argnames="scale")
stats = jax.jit(group_stats)


def advantages(rewards, valid=None, scale="std"):
    rewards = np.asarray(rewards, np.float32)
    valid = np.ones(rewards.shape, bool) if valid is None else np.asarray(valid)
    return np.asarray(compute(rewards, valid, scale=scale))


def reference(rewards, valid, scale):
    """One group at a time, float64, on the valid samples alone."""
    out = np.zeros(rewards.shape)
    for p in range(rewards.shape[0]):
        group = rewards[p][valid[p]].astype(np.float64)
        if group.size > 1 and np.ptp(group) > 0:
            deviation = group.std() + 1e-6 if scale == "std" else 1.0
            out[p, valid[p]] = (group - group.mean()) / deviation
    return out


@st.composite
def batches(draw):
    """A batch of ragged groups with rewards in eighths, so that equal means equal."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rewards = rng.integers(-16, 17, (GROUPS, SAMPLES)).astype(np.float32) / 8
    rewards[rng.random(GROUPS) < 0.2] = 0.375
    return rewards, rng.random((GROUPS, SAMPLES)) < draw(st.sampled_from([0.3, 0.7, 1.0]))


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from(["std", "none"]))
def test_advantages_equal_the_reference_on_ragged_groups(batch, scale):
    rewards, valid = batch
    expected = reference(rewards, valid, scale)
    np.testing.assert_allclose(advantages(rewards, valid, scale), expected, rtol=2e-6, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_advantages_follow_their_samples_when_a_batch_is_reordered(batch, random):
    rewards, valid = batch
    rows, columns = list(range(GROUPS)), list(range(SAMPLES))
    random.shuffle(rows)
    random.shuffle(columns)
    pick = np.ix_(rows, columns)
    expected = advantages(rewards, valid)[pick]
    np.testing.assert_allclose(advantages(rewards[pick], valid[pick]), expected, atol=1e-6, rtol=0)


@settings(max_examples=30, deadline=None)
@given(batches(), st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -7.0]))
def test_what_an_invalid_sample_holds_changes_no_bit(batch, junk):
    """BR-129: an unscored sample is outside of its group, not a reward of 0."""
    rewards, valid = batch
    expected = advantages(np.where(valid, rewards, 0.0), valid)
    got = advantages(np.where(valid, rewards, junk), valid)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(got[~valid], 0.0)


def test_junk_is_dropped_without_the_compilers_help():
    """Compiled, 0 * NaN with a converted mask may become a select; run op by op it is NaN."""
    rewards, valid = np.array([[1, 0, np.nan], [np.inf] * 3]), np.array([[1, 1, 0], [0] * 3], bool)
    got = group_advantages(rewards, valid, scale="none")
    np.testing.assert_array_equal(got, [[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]])


def test_one_win_in_four_gives_sqrt_3():
    np.testing.assert_allclose(advantages([[1, 0, 0, 0]])[0], ONE_WIN, rtol=1e-6)
    np.testing.assert_allclose(advantages([[1, 0, 0, 0]])[0], [1.732, -0.577, -0.577, -0.577], 1e-3)


def test_dr_grpo_only_subtracts_the_mean():
    got = advantages([[1, 0, 0, 0]], scale="none")
    np.testing.assert_array_equal(got, [[0.75, -0.25, -0.25, -0.25]])


@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_group_with_one_valid_sample_gives_zero(scale):
    """BR-055: ragged filtering, and a group size of one."""
    got = advantages([[3.0, 8.0, 1.0, 2.0]], [[False, True, False, False]], scale)
    np.testing.assert_array_equal(got, 0.0)
    np.testing.assert_array_equal(advantages([[3.0], [-1.0]], scale=scale), 0.0)


def test_equal_rewards_give_exactly_zero_though_their_mean_is_rounded():
    rewards = np.full((1, 10), 0.1, np.float32)
    mean = np.asarray(jax.jit(lambda r: jnp.sum(r) / 10)(rewards))
    assert mean != rewards[0, 0]  # otherwise this case shows nothing
    np.testing.assert_array_equal(advantages(rewards), 0.0)


def test_a_group_without_valid_samples_gives_zero():
    np.testing.assert_array_equal(advantages(np.full((1, 4), np.nan), np.zeros((1, 4), bool)), 0.0)


def test_a_valid_nan_reward_is_seen_and_stays_in_its_group():
    got = advantages([[np.nan, 0, 0, 0], [1, 0, 0, 0]])
    assert np.isnan(got[0]).all()
    np.testing.assert_allclose(got[1], ONE_WIN, rtol=1e-6)


def test_dynamic_sampling_keeps_groups_with_two_different_valid_rewards():
    rewards = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 1, 1]], np.float32)
    valid = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]], bool)
    np.testing.assert_array_equal(informative_groups(rewards, valid), [True, False, False, False])


def test_stats_count_each_kind_of_group_once():
    rewards = np.array([[1, 0, np.nan], [2, 2, 2], [np.nan, 6, np.nan], [9, 9, 9]], np.float32)
    valid = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 0], [0, 0, 0]], bool)
    got = {name: float(value) for name, value in stats(rewards, valid).items()}
    # Valid rewards: 1 0 2 2 2 6, mean 13 / 6; of two comparable groups one is flat.
    assert got.pop("reward_mean") == pytest.approx(13 / 6, rel=1e-6)
    assert got == {"zero_variance_share": 0.5, "singletons": 1, "empty_groups": 1, "dropped": 6}


def test_stats_of_nothing_are_zero_not_nan():
    got = stats(np.full((2, 3), np.nan, np.float32), np.zeros((2, 3), bool))
    assert (got["reward_mean"], got["zero_variance_share"], got["dropped"]) == (0, 0, 6)


def test_one_device_and_eight_give_the_same_advantages():
    """BR-067: each device sees its own groups only."""
    rewards = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    valid = np.arange(32).reshape(8, 4) % 5 != 0
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    spec = PartitionSpec("data")
    local = functools.partial(group_advantages, scale="std")
    split = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    result = split(rewards, valid)
    assert len(result.sharding.device_set) == 8
    np.testing.assert_allclose(result, advantages(rewards, valid), rtol=1e-6)


@pytest.mark.parametrize("arguments, message", [
    (((2, 2), (2, 2), "variance"), "variance.*std, none"),
    (((2, 3), (2, 2), "std"), r"\(2, 3\).*\(2, 2\)"),
    (((4,), (4,), "std"), r"must be one \[P, G\]"),
])
def test_bad_arguments_are_named(arguments, message):
    shape, valid_shape, scale = arguments
    call = functools.partial(group_advantages, scale=scale)
    with pytest.raises(ValueError, match=message):
        call(jnp.zeros(shape), jnp.ones(valid_shape, bool))
