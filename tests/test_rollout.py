"""The engine: ends, masks, keys, log-probs and the record that crosses."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    EOS,
    FULL,
    LAST_HALF,
    LENGTH,
    MOE,
    PROMPT_LENGTHS,
    RESPONSE,
    ROWS,
    SAMPLES,
    TEMPERATURE,
    WIDTH,
    forward,
)

from trace_jax import fp4
from trace_jax.model.moe import NOT_RECORDED
from trace_jax.rollout import Engine
from trace_jax.rollout.sampling import request_keys, sample

GREEDY = {"temperature": 0.0, "plan": LAST_HALF, "audit_rows": 3}


def fetch(**settings):
    return jax.device_get(helpers.rollout("nvfp4", **settings))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


# --- sampling ------------------------------------------------------------------------------


def test_the_reported_logp_is_of_the_distribution_sampled_from():
    """BR-037: logits [1, 2] at T 0.6; before temperature token 1 has -0.31326."""
    keys = request_keys(0, 0, jnp.zeros(64, jnp.int32), jnp.arange(64))
    logits = jnp.tile(jnp.array([[1.0, 2.0]]), (64, 1))
    tokens, logp = sample(logits, keys, jnp.zeros(64, jnp.int32), 0.6)
    assert set(tokens.tolist()) == {0, 1}
    np.testing.assert_allclose(logp[tokens == 1], -0.17301, atol=1e-5)
    np.testing.assert_allclose(logp[tokens == 0], -0.17301 - 1 / 0.6, atol=1e-5)
    assert logp.dtype == jnp.float32


def test_samples_follow_the_distribution_at_the_temperature():
    count, logits = 20_000, np.array([0.5, -1.0, 1.5, 0.0])
    keys = request_keys(1, 0, jnp.arange(count), jnp.zeros(count, jnp.int32))
    rows = jnp.tile(jnp.asarray(logits, jnp.float32)[None], (count, 1))
    tokens, _ = sample(rows, keys, jnp.arange(count) % 7, 0.7)
    probs = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    expected = count * probs
    chi2 = np.sum((np.bincount(tokens, minlength=4) - expected) ** 2 / expected)
    assert chi2 < 16.3  # 3 degrees of freedom, 0.1 %


def test_keys_differ_by_seed_iteration_prompt_sample_and_position():
    one = jnp.zeros(1, jnp.int32)
    keys = [
        request_keys(seed, iteration, one + prompt, one + index)
        for seed, iteration, prompt, index in np.ndindex(2, 2, 2, 2)
    ]
    draws = [
        tuple(
            sample(jnp.zeros((1, 1000)), key, one + position, 1.0)[0].tolist()
            for position in (4, 5)
        )
        for key in keys
    ]
    assert len({token for pair in draws for (token,) in pair}) > 28  # of 32, by chance 31.5


def test_at_temperature_zero_sampling_is_argmax_and_finite():
    """BR-154: the log-prob is then that at temperature 1."""
    keys = request_keys(0, 0, jnp.zeros(2, jnp.int32), jnp.arange(2))
    logits = jnp.array([[1.0, 3.0, 3.0], [200.0, -200.0, 0.0]])
    tokens, logp = sample(logits, keys, jnp.zeros(2, jnp.int32), 0.0)
    np.testing.assert_array_equal(tokens, [1, 0])  # ties to the lower index
    np.testing.assert_allclose(logp, [-np.log(2 + np.exp(-2)), 0.0], atol=1e-6)


# --- ends and masks ---------------------------------------------------------------------------


def test_any_eos_ends_a_row_and_is_in_the_mask_and_a_cut_row_has_none():
    """BR-042, BR-043: recomputed from the tokens."""
    out = fetch()
    ended_by = set()
    for row in range(ROWS):
        start, end = out.prompt_length[row], out.length[row]
        assert start == np.repeat(PROMPT_LENGTHS, SAMPLES)[row] and end > start
        response = out.tokens[row, start:end].tolist()
        stops = [i for i, token in enumerate(response) if token in EOS]
        assert stops == ([len(response) - 1] if out.finished[row] else [])
        assert out.finished[row] or len(response) == RESPONSE
        ended_by.update(response[i] for i in stops)
        np.testing.assert_array_equal(np.flatnonzero(out.mask[row]), np.arange(start, end))
        assert (out.tokens[row, end:] == 0).all()
    assert ended_by == set(EOS) and not out.finished.all()  # the fixture shows all three ends


def test_prompts_are_in_front_of_their_responses():
    out = fetch()
    tokens, lengths = (np.repeat(np.asarray(a), SAMPLES, axis=0) for a in helpers.prompts())
    np.testing.assert_array_equal(out.prompt_length, lengths)
    for row in range(ROWS):
        np.testing.assert_array_equal(out.tokens[row, : lengths[row]], tokens[row, : lengths[row]])
    np.testing.assert_array_equal(out.valid, np.arange(LENGTH)[None] < out.length[:, None])


# --- requests and keys ---------------------------------------------------------------------------


def run(seed=0, *, keys=None, order=None, params=None, version=3):
    tokens, lengths = helpers.prompts()
    keys = helpers.keys(seed) if keys is None else keys
    if order is not None:
        tokens, lengths = tokens[order], lengths[order]
        keys = keys.reshape(-1, SAMPLES)[order].reshape(-1)
    params = helpers.rollout_params_of(MOE, "nvfp4") if params is None else params
    return helpers.engine("nvfp4")(params, tokens, lengths, keys, version=version)


def test_a_request_draws_the_same_in_any_order_of_the_batch():
    order = np.array([2, 0, 1])
    rows = (order[:, None] * SAMPLES + np.arange(SAMPLES)).ravel()
    mixed, straight = run(order=order), run()
    for name in ("tokens", "logp", "mask", "finished"):
        np.testing.assert_array_equal(
            getattr(mixed, name), np.asarray(getattr(straight, name))[rows], err_msg=name
        )


def test_a_request_alone_equals_the_same_one_in_a_batch_after_a_sync():
    """BR-150, BR-152; and BR-032: the batch's engine has run other weights before, the
    engine of the single request is fresh."""
    run()
    params = helpers.rollout_params_of(MOE, "nvfp4", 1)
    batch = jax.device_get(run(params=params, version=8))
    fresh = Engine(helpers.engine("nvfp4").config)
    tokens, lengths = helpers.prompts()
    keys = helpers.keys()
    assert not np.array_equal(batch.tokens, fetch().tokens)
    for i in range(helpers.PROMPTS):
        rows = slice(i * SAMPLES, (i + 1) * SAMPLES)
        solo = fresh(params, tokens[i : i + 1], lengths[i : i + 1], keys[rows], version=8)
        np.testing.assert_array_equal(solo.tokens, batch.tokens[rows])
        np.testing.assert_array_equal(solo.finished, batch.finished[rows])
        np.testing.assert_allclose(solo.logp, batch.logp[rows], atol=0.01)


def test_another_seed_and_another_sample_draw_other_tokens():
    base, other = fetch(), jax.device_get(run(seed=1))
    sampled = base.mask & other.mask
    assert np.mean(base.tokens[sampled] == other.tokens[sampled]) < 0.7
    pairs = base.tokens.reshape(-1, SAMPLES, LENGTH)
    assert not any(np.array_equal(*pair) for pair in pairs)


def test_a_rollout_is_reproducible_and_keeps_nothing_of_an_earlier_call():
    """BR-027 for the engine."""
    first = run()
    run(seed=5, params=helpers.rollout_params_of(MOE, "nvfp4", 1))
    equal(run(), first)


def test_the_version_is_carried():
    np.testing.assert_array_equal(run(version=11).version, np.full(ROWS, 11))
    assert run(version=11).version.dtype == jnp.int32


# --- log-probs -----------------------------------------------------------------------------------


def rescored(policy, out, temperature):
    """Log-probs of the sampled tokens by the training forward; 0 elsewhere."""
    numerics = helpers.audited(MOE, policy)
    _, logits = forward(MOE, numerics, helpers.params_of(MOE), jnp.asarray(out.tokens))
    scaled = np.asarray(logits, np.float64)[:, :-1] / temperature
    log_z = np.log(np.exp(scaled).sum(-1))
    chosen = np.take_along_axis(scaled, out.tokens[:, 1:, None], axis=-1)[..., 0] - log_z
    return np.where(out.mask, np.pad(chosen, ((0, 0), (1, 0))), 0.0)


@pytest.mark.parametrize("policy", ["bf16", "nvfp4"])
def test_reported_logps_are_those_of_the_training_forward(policy):
    out = jax.device_get(helpers.rollout(policy))
    np.testing.assert_allclose(out.logp, rescored(policy, out, TEMPERATURE), atol=0.005)
    assert np.abs(out.logp - rescored(policy, out, 1.0)).max() > 0.2  # T is in it
    assert (out.logp[out.mask] < 0).all()


def test_greedy_takes_the_most_likely_token_and_both_samples_agree():
    """BR-154."""
    out = fetch(**GREEDY)
    params = helpers.params_of(MOE)
    _, logits = forward(MOE, helpers.audited(MOE, "nvfp4"), params, jnp.asarray(out.tokens))
    best = np.pad(np.argmax(logits, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    np.testing.assert_array_equal(out.tokens[out.mask], best[out.mask])
    np.testing.assert_array_equal(out.tokens[::2], out.tokens[1::2])
    assert np.isfinite(out.logp).all()
    np.testing.assert_allclose(out.logp, rescored("nvfp4", out, 1.0), atol=0.005)


# --- the record ---------------------------------------------------------------------------------


def test_recorded_are_all_tokens_that_were_fed():
    """Neither padding nor the last sampled token, which was never fed back."""
    out = fetch()
    np.testing.assert_array_equal(
        out.guidance.recorded, np.arange(LENGTH)[None] < out.length[:, None] - 1
    )


def test_routes_align_with_fed_tokens_and_pads_carry_the_marker():
    """BR-085, BR-087: a prompt of 10 and a response of 5 have 14 routes a layer."""
    out = fetch()
    none = out.routes == NOT_RECORDED
    np.testing.assert_array_equal(none.all(axis=-1), none.any(axis=-1))
    np.testing.assert_array_equal(
        ~none.any(axis=-1), np.broadcast_to(out.guidance.recorded, (MOE.num_layers, ROWS, LENGTH))
    )
    full = np.flatnonzero(out.length == WIDTH + RESPONSE)
    assert len(full) and PROMPT_LENGTHS.max() == WIDTH == 10
    assert (np.sum(~none[:, full, :, 0], axis=-1) == 14).all()
    live = forward(
        MOE, helpers.audited(MOE, "nvfp4"), helpers.params_of(MOE), jnp.asarray(out.tokens)
    )[0].record.routes
    where = out.guidance.recorded
    np.testing.assert_array_equal(out.routes[:, where], np.asarray(live)[:, where])


def test_the_record_is_what_its_plan_keeps_of_the_whole_codes():
    out = fetch()
    wanted = jax.device_get(helpers.guidance_of(out, FULL))
    assert set(out.guidance.sites) == set(fp4.SITES)
    where = out.guidance.recorded
    keep = lambda tree: jax.tree.map(lambda a: a[:, where], tree)
    equal(keep(out.guidance.sites), keep(wanted.sites))
    # The rows kept for the audit are the first ones, and only as many as asked for.
    greedy = fetch(**GREEDY)
    wanted = jax.device_get(helpers.guidance_of(greedy, LAST_HALF))
    for site in LAST_HALF.sites:
        assert greedy.audit[site].codes.shape[:3] == (MOE.num_layers, 3, LENGTH)
        where = greedy.guidance.recorded[:3]
        mine = jax.tree.map(lambda a: a[:, :3][:, where], greedy.guidance.sites[site])  # noqa: B023
        equal(mine, jax.tree.map(lambda a: a[:, where], wanted.sites[site]))  # noqa: B023


@pytest.mark.parametrize(
    "settings, plan", [({}, FULL), (GREEDY, LAST_HALF)], ids=["all, 4 bits", "last half, 1 bit"]
)
def test_the_record_has_the_bytes_that_the_accounting_says(settings, plan):
    out = fetch(**settings)
    stored = sum(a.nbytes for a in jax.tree.leaves(out.guidance.sites))
    assert stored / (ROWS * LENGTH) == fp4.guidance_bytes_per_token(MOE, plan)
    assert all(a.dtype == np.uint8 for a in jax.tree.leaves(out.guidance.sites))


def test_noise_changes_the_record_and_its_seed_changes_it_again():
    noisy = helpers.engine("nvfp4", noise=0.01)
    params = helpers.rollout_params_of(MOE, "nvfp4")
    draw = lambda seed: noisy(params, *helpers.prompts(), helpers.keys(), noise_seed=seed)
    first, second, again = (jax.device_get(draw(seed)) for seed in (0, 1, 0))
    equal(first, again)
    prompt = np.arange(LENGTH)[None] < first.prompt_length[:, None]
    for a, b in ((first, second), (first, fetch())):
        share = helpers.agreement(a.audit, b.audit, prompt)
        assert all(0.3 < value < 0.95 for value in share.values()), share
