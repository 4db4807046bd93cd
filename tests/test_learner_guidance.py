"""What a learner makes of guidance and routes, by forwards alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from learner_helpers import (
    RESPONSE,
    VERSION,
    moe,
    moe_logp,
    moe_rollout,
)

from trace_jax.rl.batches import response_window


def gap(logp: np.ndarray) -> float:
    """Mean |difference| to the log-probs that the rollout sampled with."""
    rolled = moe_rollout()
    window = lambda x: np.asarray(response_window(x, rolled.prompt_length, RESPONSE))
    inside = np.arange(RESPONSE)[None] < np.asarray(rolled.length - rolled.prompt_length)[:, None]
    return float(np.abs(logp - window(rolled.logp))[inside].mean())


def test_guidance_closes_most_of_the_gap_that_engine_noise_opens():
    unguided, guided = gap(moe_logp(moe("qat"))), gap(moe_logp(moe("trace", "drop")))
    assert unguided > 0.05, "the noise must matter, or the test shows nothing"
    assert guided < unguided / 5


def test_dropped_guidance_leaves_plain_quantization():
    """Guidance of an older version is not used under "drop": not even as zero bits."""
    learner = moe("trace", "drop")
    fresh, stale = moe_logp(learner), moe_logp(learner, version=VERSION + 1)
    np.testing.assert_array_equal(stale, moe_logp(moe("qat")))
    assert np.abs(fresh - stale).max() > 0.05


def test_obeyed_guidance_ignores_the_version_and_faded_guidance_weakens():
    obey, fade = moe("trace", "obey"), moe("trace", "fade")
    np.testing.assert_array_equal(moe_logp(obey), moe_logp(obey, version=VERSION + 2))
    lags = [gap(moe_logp(fade, version=VERSION + lag)) for lag in (0, 6)]
    assert lags[0] < 0.5 * lags[1]


def test_routes_of_the_rollout_are_replayed():
    rolled = moe_rollout()
    other = rolled.replace(routes=jnp.where(rolled.routes >= 0, 3 - rolled.routes, -1))
    replay, live = moe("qat"), moe("qat", replay=False)
    assert np.abs(moe_logp(replay) - moe_logp(replay, other)).max() > 0.05
    np.testing.assert_array_equal(moe_logp(live), moe_logp(live, other))


def test_a_rollout_of_fp4_is_sampled_with_the_version_it_was_given():
    assert set(np.asarray(moe_rollout().version).tolist()) == {VERSION}
    assert dataclasses.is_dataclass(moe("trace").config) and moe("trace").guided
    assert not moe("qat").guided
