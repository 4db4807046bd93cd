"""Weights against the train/rollout gap: values, what is missing, what is counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.rl.corrections import KINDS, correction_weights

N, T = 4, 6
run = jax.jit(
    correction_weights, static_argnames=("kind", "cap", "low", "high", "sequence_cap")
)
BOUNDS = dict(cap=2.0, low=0.5, high=1.6, sequence_cap=1.3)


def correct(trainer, rollout, mask, kind, **kw):
    arrays = [np.asarray(x, np.float32) for x in (trainer, rollout, mask)]
    weights, metrics = run(*arrays, kind=kind, **kw)
    return np.asarray(weights), {name: float(x) for name, x in metrics.items()}


def from_ratios(ratios, kind, mask=None, **kw):
    """Correction of rows whose p_trainer / p_rollout are `ratios`."""
    rollout = np.full(np.shape(ratios), -1.0)
    mask = np.ones(np.shape(ratios)) if mask is None else mask
    return correct(rollout + np.log(ratios), rollout, mask, kind, **kw)


def reference(trainer, rollout, mask, kind):
    """Token by token in float64: weights and the number of altered tokens."""
    weights, altered = np.zeros((N, T)), 0
    for n in range(N):
        tokens = [t for t in range(T) if mask[n, t] and np.isfinite(rollout[n, t])]
        gaps = {t: float(trainer[n, t]) - float(rollout[n, t]) for t in tokens}
        for t in tokens:
            ratio = np.exp(gaps[t])
            if kind == "tis":
                weights[n, t], changed = min(ratio, 2.0), ratio > 2.0
            elif kind == "icepop":
                changed = not 0.5 <= ratio <= 1.6
                weights[n, t] = 0.0 if changed else ratio
            else:
                mean = np.exp(np.mean(list(gaps.values())))
                changed = not 1 / 1.3 <= mean <= 1.3
                weights[n, t] = not changed
            altered += changed
    return weights, altered


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["tis", "icepop", "sequence_mask"]))
def test_weights_and_counts_equal_the_reference(seed, kind):
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(size=(N, T)).astype(np.float32)
    trainer = (rollout + 0.6 * rng.normal(size=(N, T)) + 0.3 * rng.normal(size=(N, 1)))
    trainer = trainer.astype(np.float32)
    rollout[rng.random((N, T)) < 0.1] = np.nan
    mask = rng.random((N, T)) < 0.7
    weights, metrics = correct(trainer, rollout, mask, kind, **BOUNDS)
    expected, altered = reference(trainer, rollout, mask, kind)
    np.testing.assert_allclose(weights, expected, rtol=2e-6)
    counted = (mask & np.isfinite(rollout)).sum()
    assert metrics["altered_share"] == pytest.approx(altered / max(counted, 1), rel=1e-6)
    assert metrics["weight_mean"] == pytest.approx(expected.sum() / max(counted, 1), rel=1e-5)
    assert metrics["missing"] == (mask & np.isnan(rollout)).sum()
    assert metrics["dropped_sequences"] == (mask.any(1) & ~(expected != 0).any(1)).sum()


def test_tis_caps_from_above_only():
    weights, metrics = from_ratios([[0.01, 1.0, 4.9, 7.0]], "tis")
    np.testing.assert_allclose(weights, [[0.01, 1.0, 4.9, 5.0]], rtol=1e-6)
    assert metrics["altered_share"] == 0.25


def test_icepop_zeroes_both_sides_and_keeps_the_ratio_between():
    weights, metrics = from_ratios([[0.49, 0.51, 1.0, 4.9, 5.1]], "icepop")
    np.testing.assert_allclose(weights, [[0.0, 0.51, 1.0, 4.9, 0.0]], rtol=1e-6)
    assert metrics["altered_share"] == pytest.approx(0.4)


def test_the_sequence_mask_goes_by_the_geometric_mean_of_counted_tokens():
    # Geometric means 1, 2.2, 1 / 2.2, and 1.8 once the masked 100 is left out; the band is 2.
    ratios = [[8.0, 0.125], [2.2, 2.2], [1 / 2.2, 1 / 2.2], [1.8, 100.0]]
    mask = np.array([[1, 1], [1, 1], [1, 1], [1, 0]])
    weights, metrics = from_ratios(ratios, "sequence_mask", mask)
    np.testing.assert_array_equal(weights, [[1, 1], [0, 0], [0, 0], [1, 0]])
    assert metrics["dropped_sequences"] == 2
    assert metrics["altered_share"] == pytest.approx(4 / 7)


def test_none_gives_one_under_the_mask():
    weights, metrics = from_ratios([[9.0, 0.1, 1.0]], "none", [[1, 1, 0]])
    np.testing.assert_array_equal(weights, [[1, 1, 0]])
    assert metrics == dict(altered_share=0, weight_mean=1, dropped_sequences=0, missing=0)


@pytest.mark.parametrize("kind", ["tis", "icepop", "sequence_mask"])
def test_a_missing_rollout_logprob_masks_its_token(kind):
    """BR-039: 9 log-probs for 10 tokens; a pad of 0.0 would mean probability 1."""
    trainer = np.full((1, 10), -0.1)
    rollout = np.concatenate([np.full((1, 9), -0.1), [[np.nan]]], axis=1)
    weights, metrics = correct(trainer, rollout, np.ones((1, 10)), kind)
    np.testing.assert_array_equal(weights, [[1] * 9 + [0]])
    assert (metrics["missing"], metrics["weight_mean"]) == (1, 1)


def test_a_short_row_of_logprobs_is_an_error():
    """BR-039."""
    with pytest.raises(ValueError, match=r"\(1, 10\), \(1, 9\)"):
        correction_weights(jnp.zeros((1, 10)), jnp.zeros((1, 9)), jnp.ones((1, 9)), kind="tis")
    with pytest.raises(ValueError, match=r"\(1, 10\), \(1, 1\)"):
        correction_weights(jnp.zeros((1, 10)), jnp.zeros((1, 1)), jnp.ones((1, 10)), kind="none")


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_flows_through_the_weights(kind):
    @jax.jit
    def total(trainer, rollout):
        weights, metrics = correction_weights(trainer, rollout, jnp.ones((1, 3)), kind=kind)
        return jnp.sum(weights) + sum(metrics.values())

    rollout = jnp.full((1, 3), -1.0)
    trainer = rollout + jnp.array([[0.1, -0.3, 0.2]])
    for grad in jax.grad(total, (0, 1))(trainer, rollout):
        np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_junk_off_the_mask_and_absurd_gaps_stay_finite(kind):
    trainer = np.array([[-1.0, np.nan, np.inf, -1e30], [-1e30, -1.0, -1.0, -1.0]])
    rollout = np.array([[-1.0, np.inf, np.nan, 0.0], [-1.0, -1e30, -1.0, -1.0]])
    mask = np.array([[1, 0, 0, 0], [1, 1, 1, 0]])
    weights, metrics = correct(trainer, rollout, mask, kind)
    assert np.isfinite(weights).all() and np.isfinite(list(metrics.values())).all()
    np.testing.assert_array_equal(weights[0], [1, 0, 0, 0])
    assert weights[1, 3] == 0 and weights[1, 2] == 1


def test_an_empty_mask_gives_zeros_not_nan():
    for kind in KINDS:
        weights, metrics = correct(*np.zeros((3, 1, 4)), kind)
        np.testing.assert_array_equal(weights, 0.0)
        assert set(metrics.values()) == {0.0}


def test_unknown_kinds_and_impossible_bounds_are_refused():
    call = functools.partial(correction_weights, *jnp.zeros((3, 1, 2)))
    with pytest.raises(ValueError, match="'is'; choose one of none, tis, icepop, sequence_mask"):
        call(kind="is")
    for bounds in (dict(cap=0.0), dict(low=1.5), dict(high=0.9), dict(sequence_cap=1.0)):
        with pytest.raises(ValueError, match=next(iter(bounds))):
            call(kind="tis", **bounds)
