"""Aggregation weights, policy loss, KL: values, gradients, masks, splits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.rl import losses
from trace_jax.rl.losses import (
    ALGORITHMS,
    aggregation_weights,
    kl_to_reference,
    policy_loss,
)

MODES = ["token_mean", "sequence_mean", "constant"]
N, T = 6, 5


@functools.cache
def policy(level="token", clip=(0.2, 0.2), dual_clip=None):
    """Jitted (loss, metrics), gradient by logp."""
    settings_ = dict(clip_low=clip[0], clip_high=clip[1], level=level, dual_clip=dual_clip)
    return jax.jit(jax.value_and_grad(functools.partial(policy_loss, **settings_), has_aux=True))


def run_policy(logp, old_logp, advantages, mask, weights, **kw):
    arrays = [np.asarray(x, np.float32) for x in (logp, old_logp, advantages, mask, weights)]
    (loss, metrics), grad = policy(**kw)(*arrays)
    return float(loss), {name: float(x) for name, x in metrics.items()}, np.asarray(grad)


make_weights = jax.jit(aggregation_weights, static_argnames=("mode", "max_length"))
kl_and_grad = jax.jit(jax.value_and_grad(kl_to_reference))


# Aggregation


def numpy_weights(mask, mode, max_length):
    rows = [row for row in range(len(mask)) if mask[row].any()]
    out = np.zeros(mask.shape)
    for row in rows:
        scale = {
            "token_mean": mask.sum(),
            "sequence_mean": mask[row].sum() * len(rows),
            "constant": len(rows) * max_length,
        }[mode]
        out[row] = mask[row] / scale
    return out


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from(MODES), st.sampled_from([0.1, 0.5, 1.0]))
def test_aggregation_weights_equal_their_formulas(seed, mode, density):
    mask = np.random.default_rng(seed).random((N, T)) < density
    got = make_weights(mask.astype(np.float32), mode, max_length=7)
    np.testing.assert_allclose(got, numpy_weights(mask, mode, 7), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_gets_zero_weights_not_nan(mode):
    """BR-162 too: a prompt that fills the budget leaves no tokens."""
    for call in (make_weights, aggregation_weights):  # op by op, 0 / 0 meets no simplifier
        np.testing.assert_array_equal(call(np.zeros((N, T), bool), mode, max_length=T), 0.0)
        half = call(np.array([[0, 0], [1, 0]]), mode, max_length=2)
        np.testing.assert_array_equal(half, [[0, 0], [0.5 if mode == "constant" else 1, 0]])


def aggregate(values, mask, mode, max_length=100):
    """Loss whose per-token losses are `values`: ratio 1 everywhere, one value a row."""
    logp, rows = np.zeros(mask.shape), -np.asarray(values)
    weights = make_weights(mask, mode, max_length=max_length)
    return run_policy(logp, logp, rows, mask, weights)


def test_micro_batches_add_up_to_one_token_mean():
    """BR-057: 2 tokens of loss 1 and 8 of loss 0 are 0.2; the mean of two means is 0.5."""
    mask = np.array([[1] * 2 + [0] * 6, [1] * 8])
    weights = np.asarray(make_weights(mask, "token_mean", max_length=8))
    zeros, rows = np.zeros((2, 8)), [[-1.0], [0.0]]
    parts = [
        run_policy(zeros[i:i + 1], zeros[i:i + 1], rows[i], mask[i:i + 1], weights[i:i + 1])[0]
        for i in range(2)
    ]
    assert sum(parts) == pytest.approx(0.2, rel=1e-6)
    assert aggregate([1.0, 0.0], mask, "token_mean")[0] == pytest.approx(0.2, rel=1e-6)


def test_masked_tokens_are_out_of_the_numerator_and_have_no_gradient():
    """BR-059: [[1, 100], [1, -50]] under [[1, 0], [1, 0]] is 1; with them it is 26."""
    # Ratios off the mask make the losses 100 and -50 there.
    logp = np.log([[1.0, 100.0], [1.0, 50.0]])
    mask = np.array([[1, 0], [1, 0]])
    weights = np.full((2, 2), 0.5)  # not zero off the mask: the loss's own mask must do it
    loss, metrics, grad = run_policy(logp, np.zeros((2, 2)), [-1, -1], mask, weights)
    assert loss == 1.0
    np.testing.assert_array_equal(grad, [[0.5, 0.0], [0.5, 0.0]])
    assert (metrics["ratio_max"], metrics["ratio_mean"], metrics["tokens"]) == (1, 1, 2)
    metrics = run_policy(logp - 0.5, np.zeros((2, 2)), [-1, -1], mask, weights)[1]
    assert metrics["ratio_max"] == pytest.approx(np.exp(-0.5), rel=1e-6)


def test_masked_tokens_are_out_of_the_denominator():
    """BR-060: 10 tokens of loss 1 beside 90 masked ones is 1; with them 0.1."""
    mask = np.zeros((2, 90), bool)
    mask[0, :10] = True
    assert aggregate([1.0, 1.0], mask, "token_mean")[0] == pytest.approx(1.0, rel=1e-6)
    assert aggregate([1.0, 1.0], mask, "sequence_mean")[0] == pytest.approx(1.0, rel=1e-6)
    constant = aggregate([1.0, 1.0], mask, "constant", max_length=20)[0]
    assert constant == pytest.approx(0.5, rel=1e-6)  # 10 tokens of a budget of 20


def random_batch(seed, spread=0.5):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=(N, T))
    logp = old + spread * rng.normal(size=(N, T))
    mask = rng.random((N, T)) < 0.7
    mask[0] = False
    weights = np.where(mask, rng.random((N, T)), 0.0)
    return [x.astype(np.float32) for x in (logp, old, rng.normal(size=N), mask, weights)]


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from(MODES), st.sampled_from(["token", "sequence"]))
def test_loss_and_gradient_do_not_depend_on_the_micro_batch_split(seed, mode, level):
    """BR-057."""
    logp, old, advantages, mask, _ = random_batch(seed)
    weights = np.asarray(make_weights(mask, mode, max_length=T))
    whole, metrics, grad = run_policy(logp, old, advantages, mask, weights, level=level)
    order = np.random.default_rng(seed).permutation(N)
    total, ratio, joined = 0.0, 0.0, np.zeros_like(grad)
    for rows in (order[:3], order[3:]):
        batch = (x[rows] for x in (logp, old, advantages, mask, weights))
        part, part_metrics, joined[rows] = run_policy(*batch, level=level)
        total, ratio = total + part, ratio + part_metrics["ratio_mean"] * part_metrics["tokens"]
    assert total == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert ratio / mask.sum() == pytest.approx(metrics["ratio_mean"], rel=1e-5)
    np.testing.assert_allclose(joined, grad, rtol=1e-6, atol=1e-8)


# Policy loss


def numpy_policy(logp, old, advantages, mask, weights, level, low, high, dual_clip):
    """Loss, gradient and clipped tokens, token by token in float64."""
    loss, clipped, grad = 0.0, 0, np.zeros((N, T))
    log_ratio = logp.astype(np.float64) - old
    for n in range(N):
        tokens = np.flatnonzero(mask[n])
        for t in tokens:
            r = np.exp(log_ratio[n, t] if level == "token" else log_ratio[n, tokens].mean())
            a = float(advantages[n])
            objective = min(r * a, np.clip(r, 1 - low, 1 + high) * a)
            live = objective == r * a
            clipped += not live
            if dual_clip is not None and a < 0 and objective < dual_clip * a:
                objective, live = dual_clip * a, False
            loss -= weights[n, t] * objective
            grad[n, t] = -weights[n, t] * r * a * live
    return loss, grad, clipped / mask.sum()


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([
        dict(level="token"),
        dict(level="token", clip=(0.2, 0.28), dual_clip=1.5),
        dict(level="sequence", clip=(3e-4, 4e-4)),
        dict(level="sequence", clip=(0.1, 0.2), dual_clip=1.25),
    ]),
)
def test_policy_loss_and_gradient_equal_the_reference(seed, kw):
    batch = random_batch(seed)
    low, high = kw.get("clip", (0.2, 0.2))
    expected = numpy_policy(*batch, kw["level"], low, high, kw.get("dual_clip"))
    loss, metrics, grad = run_policy(*batch, **kw)
    assert loss == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(grad, expected[1], rtol=2e-6, atol=1e-8)
    assert metrics["clip_fraction"] == pytest.approx(expected[2], abs=1e-6)


def test_clipping_cuts_and_counts_only_the_side_that_would_gain():
    """BR-063."""
    logp, advantages = np.log([[1.3], [0.7], [1.3], [0.7]]), [1, -1, -1, 1]
    ones, zeros = np.ones((4, 1)), np.zeros((4, 1))
    for row, (loss, clipped) in enumerate([(-1.2, 1), (0.8, 1), (1.3, 0), (-0.7, 0)]):
        weights = np.eye(4)[:, [row]]
        got, _, grad = run_policy(logp, zeros, advantages, ones, weights)
        assert got == pytest.approx(loss, rel=1e-6)
        assert (grad[row, 0] == 0) == clipped
    _, metrics, _ = run_policy(logp, zeros, advantages, ones, ones)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio_max"] == pytest.approx(1.3, rel=1e-6)


def test_the_sequence_ratio_is_the_geometric_mean():
    """BR-064: [+0.5, -0.5] is ratio 1, unclipped; token ratios 1.649 and 0.607 both clip."""
    shift, ones = np.array([[0.5, -0.5]]), np.ones((1, 2))
    batch = (shift, np.zeros((1, 2)), [1.0], ones, ones / 2)
    loss, metrics, grad = run_policy(*batch, level="sequence", clip=(3e-4, 4e-4))
    assert (loss, metrics["clip_fraction"], metrics["ratio_max"]) == (-1, 0, 1)
    np.testing.assert_array_equal(grad, [[-0.5, -0.5]])
    both_signs = [np.repeat(x, 2, 0) for x in (shift, np.zeros((1, 2)))]
    _, metrics, _ = run_policy(*both_signs, [1.0, -1.0], np.ones((2, 2)), np.ones((2, 2)))
    assert metrics["clip_fraction"] == 0.5  # the +0.5 of one row, the -0.5 of the other
    # A sum in place of the mean would be exp(1) for [0.5, 0.5].
    up = run_policy(np.full((1, 2), 0.5), *batch[1:], level="sequence", clip=(1.0, 1.0))
    assert up[1]["ratio_max"] == pytest.approx(np.exp(0.5), rel=1e-6)


def test_gspo_gradient_is_that_of_the_sequence_objective():
    logp, old, advantages, mask, _ = random_batch(3, spread=0.05)
    weights = np.asarray(make_weights(mask, "sequence_mean", max_length=T))

    def direct(logp):  # mean over non-empty rows of min(s A, clip(s) A), s = exp(mean log-ratio)
        length = mask.sum(1)
        s = jnp.exp(jnp.sum(mask * (logp - old), 1) / np.maximum(length, 1))
        gain = jnp.minimum(s * advantages, jnp.clip(s, 1 - 0.02, 1 + 0.02) * advantages)
        return -jnp.sum((length > 0) * gain) / (length > 0).sum()

    batch = (logp, old, advantages, mask, weights)
    loss, metrics, grad = run_policy(*batch, level="sequence", clip=(0.02, 0.02))
    assert 0 < metrics["clip_fraction"] < 1  # both branches are in the example
    assert loss == pytest.approx(float(direct(logp)), rel=1e-6)
    np.testing.assert_allclose(grad, jax.jit(jax.grad(direct))(logp), rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_at_learning_rate_zero_the_ratio_is_one_and_nothing_is_clipped(level):
    """BR-051."""
    logp, _, advantages, mask, weights = random_batch(5)
    batch = (logp, logp, advantages, mask, weights)
    _, metrics, grad = run_policy(*batch, level=level, clip=(3e-4, 4e-4))
    tokens = metrics.pop("tokens")
    assert tokens == mask.sum()
    assert metrics == dict(
        clip_fraction=0, dual_clip_fraction=0, ratio_mean=1, ratio_max=1, approx_kl=0
    )
    np.testing.assert_allclose(grad, -weights * advantages[:, None], rtol=1e-6)


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    logp, ones = np.log([[4.0], [4.0], [2.0]]), np.ones((3, 1))
    batch = (logp, np.zeros((3, 1)), [-1.0, 1.0, -1.0], ones, ones)
    loss, metrics, grad = run_policy(*batch, dual_clip=3.0)
    assert loss == pytest.approx(3.0 - 1.2 + 2.0, rel=1e-6)  # without dual clip 4 - 1.2 + 2
    assert metrics["dual_clip_fraction"] == pytest.approx(1 / 3)
    np.testing.assert_allclose(grad[:, 0], [0.0, 0.0, 2.0], rtol=1e-6)
    assert run_policy(*batch)[0] == pytest.approx(4.8, rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_junk_off_the_mask_changes_no_bit_of_value_or_gradient(level):
    logp, old, advantages, mask, weights = random_batch(7)
    expected = run_policy(logp, old, advantages, mask, weights, level=level)
    off = mask == 0
    for junk in (np.nan, np.inf, -np.inf, 1e30):
        for dirty in range(3):
            arrays = [logp, old, weights]
            arrays[dirty] = np.where(off, junk, arrays[dirty])
            rows = np.where(off.all(1), junk, advantages)
            got = run_policy(*arrays[:2], rows, mask, arrays[2], level=level)
            assert got[:2] == expected[:2]
            np.testing.assert_array_equal(got[2], expected[2])
            np.testing.assert_array_equal(got[2][off], 0.0)


def test_junk_off_the_mask_is_dropped_without_the_compilers_help():
    """Compiled, 0 * NaN with a converted mask may become a select; run op by op it is NaN."""
    junk, mask = jnp.array([[-1.0, jnp.nan]]), jnp.array([[1, 0]])
    ones = jnp.ones((1, 1))
    kw = dict(clip_low=0.2, clip_high=0.2, level="sequence")

    def loss(logp):
        policy, _ = policy_loss(logp, junk, ones[0], mask, -junk, **kw)
        return policy + kl_to_reference(logp, junk, mask, -junk)

    value, grad = jax.value_and_grad(loss)(junk)
    assert value == -1
    np.testing.assert_array_equal(grad, [[-1.0, 0.0]])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("gap", [100.0, -100.0, 1e30, np.inf, -np.inf])
def test_an_absurd_log_ratio_stays_finite(gap, level):
    old, ones = np.array([[-1.0, -1.0 - gap]]), np.ones((1, 2))
    for advantage in (1.0, -1.0):
        batch = (np.full((1, 2), -1.0), old, [advantage], ones, ones)
        loss, metrics, grad = run_policy(*batch, level=level)
        assert np.isfinite([loss, *metrics.values()]).all()
        assert np.isfinite(grad).all()
        assert metrics["ratio_max"] <= np.exp(20.001)


def test_nan_under_the_mask_is_seen():
    ones = np.ones((1, 2))
    loss, _, _ = run_policy([[np.nan, 0.0]], np.zeros((1, 2)), [1.0], ones, ones)
    assert np.isnan(loss)


def test_observation_tokens_have_no_gradient_and_action_tokens_have():
    """BR-070."""
    mask = np.array([[1, 1, 0, 0, 1]])
    for level in ("token", "sequence"):
        old, weights = np.full((1, 5), -0.01), np.full((1, 5), 0.2)
        _, _, grad = run_policy(np.zeros((1, 5)), old, [1.0], mask, weights, level=level)
        np.testing.assert_array_equal(grad != 0, mask != 0)


def test_only_the_new_log_probs_are_differentiated():
    batch = [jnp.asarray(x) for x in random_batch(9)]
    call = functools.partial(policy_loss, clip_low=0.2, clip_high=0.2, level="token")
    grads = jax.jit(jax.grad(lambda *b: call(*b)[0], (1, 2, 4)))(*batch)
    for grad in grads:
        np.testing.assert_array_equal(grad, 0.0)


def test_tbpo_holds_negative_advantages_in_a_band_on_both_sides():
    """Sequence log-ratios of A = -1, -1, -1, +1, +1 rows; only those in the band move."""
    drift = np.array([-5e-4, 0.0, 9e-4, 9e-4, -5e-4])[:, None] * np.ones((1, 3))
    tbpo = ALGORITHMS["tbpo"]
    settings_ = dict(level="sequence", clip=(tbpo["clip_low"], tbpo["clip_high"]))
    ones = np.ones((5, 3))
    _, metrics, grad = run_policy(
        drift, 0 * drift, [-1, -1, -1, 1, 1], ones, ones, dual_clip=tbpo["dual_clip"], **settings_
    )
    moved = np.abs(grad).sum(1) > 0
    np.testing.assert_array_equal(moved, [False, True, False, False, True])
    assert metrics["clip_fraction"] == pytest.approx(2 / 5)
    assert metrics["dual_clip_fraction"] == pytest.approx(1 / 5)


def test_settings_are_those_of_the_papers():
    columns = ("scale", "aggregation", "level", "clip_low", "clip_high", "dynamic_sampling")
    assert {name: tuple(entry[c] for c in columns) for name, entry in ALGORITHMS.items()} == {
        "grpo": ("std", "sequence_mean", "token", 0.2, 0.2, False),
        "dr_grpo": ("none", "constant", "token", 0.2, 0.2, False),
        "dapo": ("std", "token_mean", "token", 0.2, 0.28, True),
        "gspo": ("std", "sequence_mean", "sequence", 3e-4, 4e-4, False),
        "tbpo": ("std", "sequence_mean", "sequence", 3e-4, 4e-4, False),
    }
    assert {n: e["dual_clip"] for n, e in ALGORITHMS.items() if e["dual_clip"]} == {"tbpo": 1.0007}
    losses.algorithm("grpo")["clip_low"] = 9.0
    assert losses.algorithm("dr_grpo")["clip_low"] == losses.algorithm("grpo")["clip_low"] == 0.2


def test_unknown_names_and_shapes_that_differ_are_refused():
    ones = jnp.ones((2, 3))
    call = functools.partial(policy_loss, ones, ones, ones[:, 0], ones, ones, clip_low=0.2)
    with pytest.raises(ValueError, match="'word'; choose one of token, sequence"):
        call(clip_high=0.2, level="word")
    with pytest.raises(ValueError, match="dual_clip 1.0 must be above 1"):
        call(clip_high=0.2, level="token", dual_clip=1.0)
    with pytest.raises(ValueError, match="'mean'; choose.* token_mean, sequence_mean, constant"):
        aggregation_weights(ones, "mean", max_length=3)
    with pytest.raises(ValueError, match="'ppo'; choose one of grpo, dr_grpo, dapo, gspo"):
        losses.algorithm("ppo")
    with pytest.raises(ValueError, match=r"\(2, 1\), \(2, 3\)"):
        kl_to_reference(ones, ones[:, :1], ones, ones)


# KL to the reference


def test_k3_is_finite_with_a_gradient_that_pulls_back():
    """BR-062: ref - logp = 100; exp overflows FP32 above 88.72, its gradient is then NaN."""
    one = np.ones((1, 1), np.float32)
    value, grad = kl_and_grad(-100 * one, 0 * one, one, one)
    slope = np.expm1(10.0)
    assert float(value) == pytest.approx(slope - 10 + 90 * slope, rel=1e-6)
    assert float(grad[0, 0]) == pytest.approx(-slope, rel=1e-6)


def test_k3_equals_its_formula_and_gradient_off_and_on_the_mask():
    logp = np.array([[-1.0, -2.0, -3.0, np.nan]], np.float32)
    ref, mask = logp + np.array([[0.3, -0.4, 0.0, 1.0]], np.float32), np.array([[1, 1, 1, 0]])
    weights = np.array([[0.5, 0.25, 1.0, np.nan]], np.float32)
    value, grad = kl_and_grad(logp, ref, mask, weights)
    expected = 0.5 * (np.exp(0.3) - 1.3) + 0.25 * (np.exp(-0.4) - 0.6)
    assert float(value) == pytest.approx(expected, rel=1e-5)
    expected = [0.5 * (1 - np.exp(0.3)), 0.25 * (1 - np.exp(-0.4)), 0.0, 0.0]
    np.testing.assert_allclose(grad[0], expected, rtol=1e-5)
