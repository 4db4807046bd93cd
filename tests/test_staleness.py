"""What the trainer does with guidance of an older policy version."""

import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.fp4 import GuidancePlan
from trace_jax.model import Guidance
from trace_jax.rl.staleness import apply_staleness

RECORDED = jnp.array([[True, True, False]] * 4)
VERSIONS = jnp.array([7, 6, 4, 8])  # at version 7: lag 0, 1, 3 and -1


def staleness(**settings):
    plan = GuidancePlan(**settings)
    guidance = Guidance({}, RECORDED, VERSIONS)
    guidance, guard = apply_staleness(guidance, plan, jnp.int32(7))
    return np.asarray(guidance.recorded), None if guard is None else np.asarray(guard)


def test_obey_ignores_the_lag():
    recorded, guard = staleness(on_stale="obey")
    assert guard is None
    np.testing.assert_array_equal(recorded, RECORDED)


def test_obey_keeps_a_guard_at_its_width():
    recorded, guard = staleness(on_stale="obey", guard=0.4)
    np.testing.assert_array_equal(recorded, RECORDED)
    np.testing.assert_array_equal(guard, np.full((4, 3), 0.4, np.float32))


def test_drop_turns_off_older_rows_alone():
    recorded, guard = staleness(on_stale="drop")
    assert guard is None
    expected = np.asarray(RECORDED) & np.array([[True], [False], [False], [True]])
    np.testing.assert_array_equal(recorded, expected)
    assert recorded.any() and not recorded[1:3].any()


def test_drop_keeps_the_guard_for_fresh_rows():
    assert (staleness(on_stale="drop", guard=0.25)[1] == np.float32(0.25)).all()


@pytest.mark.parametrize("guard, full", [(None, 0.5), (0.4, 0.4)])
def test_fade_narrows_the_guard_by_a_factor_a_version(guard, full):
    recorded, width = staleness(on_stale="fade", fade=0.5, guard=guard)
    np.testing.assert_array_equal(recorded, RECORDED)
    expected = np.array([full, full / 2, full / 8, full], np.float32)
    np.testing.assert_allclose(width, np.repeat(expected[:, None], 3, axis=1), rtol=1e-6)
