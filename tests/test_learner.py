"""One policy update: token means, masks, guards, and what the ratio is against.

Compiling takes nearly all of the time. Most tests share a dense BF16 model of one
layer, for which an update is compiled in seconds; what FP4 and experts add is asked
of forwards alone.
"""

from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import params_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from learner_helpers import (
    LENGTH,
    LENGTHS,
    PROMPT,
    QUICK,
    RESPONSE,
    ROWS,
    config_of,
    learner_of,
    moe,
    moe_rollout,
)

from trace_jax import sync
from trace_jax.config import MeshConfig
from trace_jax.model import Guidance
from trace_jax.parallel import make_mesh, shard_params, shard_rows
from trace_jax.rl.batches import response_window
from trace_jax.rl.learner import Learner, apply_gradients, new_state, optimizer
from trace_jax.rollout import Rollout
from trace_jax.trainer import Trainer


@cache
def dense(**settings) -> Learner:
    optim = {k: settings.pop(k) for k in ("learning_rate",) if k in settings}
    return learner_of(config_of(rl=settings, optim=optim))


@cache
def dense_params() -> dict:
    return params_of(config_of().model)


def state_of(learner: Learner):
    return new_state(dense_params(), learner.tx)


@cache
def rollout() -> Rollout:
    rng = np.random.default_rng(0)
    at = np.arange(LENGTH)[None]
    return Rollout(
        tokens=jnp.asarray(rng.integers(1, 256, (ROWS, LENGTH)), jnp.int32),
        prompt_length=jnp.full(ROWS, PROMPT, jnp.int32),
        length=jnp.asarray(LENGTHS),
        logp=jnp.asarray(rng.normal(-5, 0.3, (ROWS, LENGTH)), jnp.float32),
        mask=jnp.asarray((at >= PROMPT) & (at < LENGTHS[:, None])),
        finished=jnp.ones(ROWS, bool),
        guidance=Guidance({}, jnp.zeros((ROWS, LENGTH), bool), jnp.zeros(ROWS, jnp.int32)),
        routes=jnp.zeros((1, ROWS, LENGTH, 1), jnp.int16),
        audit={},
    )


ADVANTAGES = jnp.asarray(np.random.default_rng(1).normal(0.3, 1, ROWS), jnp.float32)
LIVE = jnp.ones(ROWS, bool)
COUNTS = LENGTHS - PROMPT


def update(learner, rolled=None, advantages=ADVANTAGES, live=LIVE, old=None, ref=None, state=None):
    state = state_of(learner) if state is None else state
    rolled = rollout() if rolled is None else rolled
    return learner.update(state, rolled, advantages, live, old, ref)


def gradient(state) -> np.ndarray:
    """The first moment of Adam after one step, flat: a tenth of the clipped gradient."""
    (adam,) = [s for s in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(s)]
    return np.concatenate([np.asarray(a).ravel() for a in jax.tree.leaves(adam.mu)])


def _is_adam(s) -> bool:
    return isinstance(s, optax.ScaleByAdamState)


def adam_steps(state) -> int:
    (adam,) = [s for s in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(s)]
    return int(adam.count)


def assert_same_gradient(state, other):
    mine, theirs = gradient(state), gradient(other)
    assert np.linalg.norm(mine) == pytest.approx(0.1 * 0.05, rel=1e-3), "clipped, not zero"
    # Gradients of BF16 weights are sums of BF16 values: 2^-8 of the largest a part.
    np.testing.assert_allclose(mine, theirs, atol=1e-2 * np.abs(mine).max())


# --- means ---------------------------------------------------------------------------


def test_loss_is_the_mean_over_all_tokens():
    """BR-057, BR-060: with ratio 1 the loss is minus the mean advantage of the tokens."""
    expected = -np.sum(np.asarray(ADVANTAGES) * COUNTS) / COUNTS.sum()
    _, metrics = update(dense())
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["tokens"]) == COUNTS.sum()


@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_change_neither_loss_nor_gradient(parts):
    """BR-057: one token mean, whatever the split; BR-074: clipped once, after the sum."""
    whole, whole_metrics = update(dense())
    split, metrics = update(dense(micro_batches=parts))
    assert float(metrics["loss"]) == pytest.approx(float(whole_metrics["loss"]), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(
        float(whole_metrics["grad_norm"]), rel=1e-2
    )
    assert_same_gradient(whole, split)
    for name in ("entropy", "ratio_max", "tokens", "mismatch/gap_mean", "mismatch/gap_p99"):
        assert float(metrics[name]) == pytest.approx(float(whole_metrics[name]), rel=1e-4), name


def test_one_and_eight_devices_give_the_same_gradient():
    """BR-067: the loss does not depend on the number of devices."""
    learner = dense()
    one, metrics = update(learner)
    mesh = make_mesh(MeshConfig())
    assert mesh.size == 8
    # Layers lead in routes (and in guidance, which BF16 has not).
    by_layer = NamedSharding(mesh, P(None, ("data", "fsdp")))
    rolled = rollout()
    routes = jax.device_put(rolled.routes, by_layer)
    rolled = shard_rows(rolled.replace(routes=None), mesh).replace(routes=routes)
    state = shard_params(state_of(learner), mesh)
    spread = shard_rows((ADVANTAGES, LIVE), mesh)
    eight, spread_metrics = learner.update(state, rolled, *spread, None, None)
    assert len(rolled.tokens.sharding.device_set) == 8
    assert_same_gradient(one, eight)
    for name in ("loss", "grad_norm", "mismatch/gap_mean", "entropy"):
        assert float(spread_metrics[name]) == pytest.approx(float(metrics[name]), rel=2e-3), name


def test_what_lies_beyond_the_end_of_a_row_changes_nothing():
    """BR-059: padding is no context, no target, no loss."""
    inside = np.arange(LENGTH)[None] < LENGTHS[:, None]
    rolled = rollout()
    garbage = rolled.replace(
        tokens=jnp.where(inside, rolled.tokens, 200), logp=jnp.where(inside, rolled.logp, 50.0)
    )
    (clean, clean_metrics), (dirty, metrics) = update(dense()), update(dense(), garbage)
    np.testing.assert_array_equal(gradient(clean), gradient(dirty))
    assert float(metrics["mismatch/gap_max"]) == float(clean_metrics["mismatch/gap_max"])


def test_rows_that_do_not_count_leave_loss_and_gradient_alone():
    """BR-060: dead rows are in no numerator and in no denominator."""
    live = np.arange(ROWS) < 12
    expected = -np.sum((np.asarray(ADVANTAGES) * COUNTS)[live]) / COUNTS[live].sum()
    state, metrics = update(dense(), live=jnp.asarray(live))
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    rolled = rollout()
    other = rolled.replace(
        tokens=jnp.where(live[:, None], rolled.tokens, 77),
        logp=jnp.where(live[:, None], rolled.logp, jnp.nan),
    )
    advantages = jnp.where(live, ADVANTAGES, 100.0)
    changed, _ = update(dense(), other, advantages, live=jnp.asarray(live))
    assert_same_gradient(state, changed)


def test_a_batch_without_a_live_row_changes_nothing():
    state, metrics = update(dense(), live=~LIVE)
    assert float(metrics["loss"]) == 0 and float(metrics["grad_norm"]) == 0
    assert int(state.skipped) == 0 and not gradient(state).any()
    for new, old in zip(*map(jax.tree.leaves, (state.params, dense_params())), strict=True):
        np.testing.assert_array_equal(new, old)


def test_rematerialized_layers_give_the_same_gradient():
    assert_same_gradient(update(dense())[0], update(dense(remat="attention_out"))[0])


def test_response_window_starts_behind_each_prompt():
    x = jnp.arange(12).reshape(2, 6)
    window = response_window(x, jnp.array([2, 4]), 3)
    assert window.tolist() == [[2, 3, 4], [10, 11, 11]]  # beyond the end its last repeats


# --- ratio ---------------------------------------------------------------------------


def test_ratio_is_exactly_one_against_the_same_forward():
    """BR-051: no numerics in the trust region."""
    _, metrics = update(dense())
    found = {k: float(metrics[k]) for k in ("ratio_mean", "ratio_max", "clip_fraction")}
    assert found == {"ratio_mean": 1.0, "ratio_max": 1.0, "clip_fraction": 0.0}
    assert float(metrics["approx_kl"]) == 0.0


def test_two_minibatches_are_two_steps_against_the_old_policy():
    learner = dense(minibatches=2)
    old = learner.score(dense_params(), rollout(), 0)
    state, metrics = update(learner, old=old)
    assert adam_steps(state) == 2 and int(state.version) == 1
    assert 1.0 != float(metrics["ratio_max"]) < 1.5
    # Were the ratio against anything but `old`, it would stay near 1.
    _, metrics = update(learner, old=old - np.log(1.5))
    assert float(metrics["ratio_mean"]) == pytest.approx(1.5, rel=0.02)
    assert float(metrics["clip_fraction"]) > 0.3


def test_a_policy_that_does_not_move_clips_nothing_in_later_minibatches():
    """BR-051: with a vanishing learning rate every ratio stays 1."""
    learner = dense(minibatches=2, learning_rate=1e-30)
    old = learner.score(dense_params(), rollout(), 0)
    _, metrics = update(learner, old=old)
    assert float(metrics["ratio_max"]) == pytest.approx(1, abs=1e-4)
    assert float(metrics["clip_fraction"]) == 0.0
    assert float(metrics["approx_kl"]) == pytest.approx(0, abs=1e-6)


def test_old_log_probs_of_the_rollout_put_the_whole_gap_into_the_ratio():
    learner = dense(old_logprobs="rollout")
    logp = np.asarray(dense(minibatches=2).score(dense_params(), rollout(), 0))
    inside = np.arange(RESPONSE)[None] < COUNTS[:, None]
    gap = np.where(inside, logp - np.asarray(rollout().logp)[:, PROMPT:], 0.0)
    _, metrics = update(learner)
    assert float(metrics["ratio_mean"]) == pytest.approx(np.exp(gap)[inside].mean(), rel=1e-3)
    assert float(metrics["mismatch/gap_mean"]) == pytest.approx(np.abs(gap)[inside].mean(), 1e-3)
    assert float(metrics["clip_fraction"]) > 0.1


def test_correction_weighs_the_gap_between_rollout_and_old_policy():
    """The ratio counts how far the policy moved since `old`; the correction what lay before."""
    learner = dense(correction="tis", correction_cap=1.2)
    inside = np.arange(RESPONSE)[None] < COUNTS[:, None]
    sampled = np.asarray(rollout().logp)[:, PROMPT:]
    shift = np.random.default_rng(2).normal(0, 0.3, sampled.shape).astype(np.float32)
    _, metrics = update(learner, old=jnp.asarray(sampled + shift))
    weights = np.minimum(np.exp(shift), 1.2)[inside]
    assert float(metrics["correction/weight_mean"]) == pytest.approx(weights.mean(), rel=1e-4)
    altered = (np.exp(shift) > 1.2)[inside].mean()
    assert float(metrics["correction/altered_share"]) == pytest.approx(altered, abs=1e-6)
    logp = np.asarray(dense(minibatches=2).score(dense_params(), rollout(), 0))
    ratio = np.exp(logp - sampled - shift)[inside]
    assert float(metrics["ratio_mean"]) == pytest.approx(ratio.mean(), rel=1e-3)


def test_reference_kl_joins_the_loss():
    learner = dense(kl_coef=0.5)
    logp = np.asarray(dense(minibatches=2).score(dense_params(), rollout(), 0))
    away = np.random.default_rng(3).normal(0, 0.5, logp.shape).astype(np.float32)
    _, metrics = update(learner, ref=jnp.asarray(logp + away))
    inside = np.arange(RESPONSE)[None] < COUNTS[:, None]
    kl = (np.exp(away) - 1 - away)[inside].mean()
    policy = -np.sum(np.asarray(ADVANTAGES) * COUNTS) / COUNTS.sum()
    assert float(metrics["loss"]) == pytest.approx(policy + 0.5 * kl, rel=1e-3)


def test_centring_on_the_own_policy_changes_nothing_and_on_another_something():
    """Score centering (arXiv 2609.20807): the sampler's expected score is taken off."""
    learner = dense(score_centering=300)
    params = sync.to_rollout(dense_params(), learner.mode.rollout)
    own = learner.sampler_head(params, rollout())
    assert own[0].shape == (ROWS, RESPONSE, 259), "no more than the vocabulary has"
    args = rollout(), ADVANTAGES, LIVE, None, None
    plain, _ = learner.update(state_of(learner), *args)
    same, _ = learner.update(state_of(learner), *args, own)
    assert_same_gradient(plain, same)
    warmer = (own[0], jax.nn.log_softmax(1.5 * own[1]))
    other, _ = learner.update(state_of(learner), *args, warmer)
    assert np.linalg.norm(gradient(other) - gradient(plain)) > 0.1 * np.linalg.norm(gradient(plain))


def test_the_head_of_the_sampler_holds_the_log_probs_that_it_sampled_with():
    rolled, learner = moe_rollout(), moe("qat", score_centering=259)
    params = sync.to_rollout(params_of(learner.config.model), learner.mode.rollout)
    ids, logq = jax.jit(learner._sampler_head, compiler_options=QUICK)(params, rolled)
    window = lambda x: np.asarray(response_window(x, rolled.prompt_length, RESPONSE))
    at = np.argmax(np.asarray(ids) == window(rolled.tokens)[..., None], axis=-1)
    found = np.take_along_axis(np.asarray(logq), at[..., None], -1)[..., 0]
    inside = np.arange(RESPONSE)[None] < np.asarray(rolled.length - rolled.prompt_length)[:, None]
    gap = np.abs(found - window(rolled.logp))[inside]
    assert np.median(gap) < 0.2, "the rollout carried engine noise, its twin does not"


# --- optimizer -----------------------------------------------------------------------


def test_fp32_masters_survive_updates_that_bf16_would_swallow():
    """BR-072: 1.0 and an Adam step of 1e-6 give 0.999999."""
    tx = optimizer(config_of(optim={"learning_rate": 1e-6, "clip_norm": 1.0}))
    state = new_state({"w": jnp.ones(3, jnp.float32)}, tx)
    state, _ = apply_gradients(state, {"w": jnp.full(3, 0.1)}, tx)
    np.testing.assert_allclose(state.params["w"], 0.999999, rtol=1e-7)
    assert (state.params["w"] < 1).all() and state.params["w"].dtype == jnp.float32


def test_masters_and_moments_of_an_update_are_fp32():
    state, _ = update(dense())
    kinds = {a.dtype for a in jax.tree.leaves((state.params, state.opt_state)) if a.ndim}
    assert kinds == {jnp.dtype(jnp.float32)}


def test_a_non_finite_gradient_changes_nothing_and_is_counted():
    learner = dense()
    bad = ADVANTAGES.at[3].set(jnp.nan)
    first, _ = update(learner)
    second, metrics = update(learner, advantages=bad, state=first)
    assert float(metrics["skipped"]) == 1 and int(second.bad_steps) == 1
    kept = (first.params, first.opt_state), (second.params, second.opt_state)
    for old, new in zip(*map(jax.tree.leaves, kept), strict=True):
        np.testing.assert_array_equal(old, new)
    third, _ = update(learner, advantages=bad, state=second)
    assert (int(third.bad_steps), int(third.skipped)) == (2, 2)
    fourth, metrics = update(learner, state=third)
    assert (int(fourth.bad_steps), int(fourth.skipped)) == (0, 2), "in a row, and all of them"
    assert np.isfinite(float(metrics["loss"])) and int(fourth.version) == 4


def test_version_counts_consumed_rollouts():
    state, _ = update(dense())
    assert [int(state.version), int(update(dense(), state=state)[0].version)] == [1, 2]


def test_learning_rate_warms_up_from_zero():
    tx = optimizer(config_of(optim={"warmup_steps": 2, "clip_norm": 1.0, "learning_rate": 0.1}))
    state, seen = new_state({"w": jnp.ones(1)}, tx), [1.0]
    for _ in range(3):
        state, _ = apply_gradients(state, {"w": jnp.ones(1) * 0.5}, tx)
        seen.append(float(state.params["w"][0]))
    np.testing.assert_allclose(-np.diff(seen), [0, 0.05, 0.1], rtol=1e-4, atol=1e-7)


# --- dynamic sampling ----------------------------------------------------------------


@pytest.mark.parametrize("name, masked", [("dapo", True), ("grpo", False)])
def test_dynamic_sampling_masks_groups_without_a_gradient(name, masked):
    """DAPO leaves flat groups out of the token mean; the others keep them in it."""
    learner = learner_of(config_of(rl={"algorithm": name}))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    trainer = SimpleNamespace(learner=learner, mesh=mesh, queue=SimpleNamespace(lag=0))
    rewards = np.array([[1, 0], [1, 1], [0, 0], [1, 0]], np.float32)
    valid = np.array([[True, True], [True, True], [True, True], [True, False]])
    advantages, live = Trainer._advantages(trainer, rewards, valid, np.zeros(8, np.int32))
    np.testing.assert_allclose(advantages, [1, -1, 0, 0, 0, 0, 0, 0], atol=1e-4)
    kept = [1, 1, 0, 0, 0, 0, 0, 0] if masked else [1, 1, 1, 1, 1, 1, 1, 0]
    assert live.tolist() == [bool(k) for k in kept]
