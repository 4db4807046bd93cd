"""Dynamic sampling: which groups are replaced, by what, how often, and what is counted."""

import jax
import numpy as np
import pytest

from trace_jax import draws
from trace_jax.draws import Draw, fill
from trace_jax.fp4 import SiteGuidance
from trace_jax.model import Guidance
from trace_jax.rollout import Rollout

GROUPS, SAMPLES, LENGTH, LAYERS = 4, 2, 3, 2
ROWS = GROUPS * SAMPLES


def rollout(number: int) -> Rollout:
    """Every value of row r of draw `number` is 100 number + r, whatever the field."""
    value = 100 * number + np.arange(ROWS)
    by_row = lambda *rest: np.broadcast_to(value.reshape(-1, *[1] * len(rest)), (ROWS, *rest))
    by_layer = lambda *rest: np.broadcast_to(by_row(*rest), (LAYERS, ROWS, *rest))
    site = SiteGuidance(by_layer(LENGTH, 1, 4), by_layer(LENGTH, 1, 2))
    return Rollout(
        tokens=by_row(LENGTH),
        prompt_length=value,
        length=value,
        logp=by_row(LENGTH),
        mask=by_row(LENGTH),
        finished=value,
        guidance=Guidance({"k": site}, by_row(LENGTH), value),
        routes=by_layer(LENGTH, 1),
        audit={},
    )


def draw_of(number: int, *informative: int, valid=None) -> Draw:
    rewards = np.zeros((GROUPS, SAMPLES), np.float32)
    rewards[list(informative)] = [1, 0]
    valid = np.ones(rewards.shape, bool) if valid is None else valid
    return Draw(rollout(number), rewards, valid, {"sampled_tokens": 10 + number, "turns": number})


def rows_of(found: Draw) -> np.ndarray:
    """The value of each row, which all fields must share."""
    fields = jax.tree.leaves(found.rollout)
    flat = []
    for a in map(np.asarray, fields):
        by_row = a if a.shape[0] == ROWS else np.moveaxis(a, 1, 0)
        flat.append(by_row.reshape(ROWS, -1))
    whole = np.concatenate(flat, axis=1)
    np.testing.assert_array_equal(whole, np.broadcast_to(whole[:, :1], whole.shape))
    return whole[:, 0]


def test_flat_groups_are_replaced_whole_by_groups_with_a_gradient():
    """DAPO, section 3.2: every field of every sample goes along; the others stay."""
    asked = []
    new = draw_of(1, 3, 1)
    found = fill(draw_of(0, 0, 2), lambda i: asked.append(i) or new)
    # Groups 1 and 3 were flat; they are now groups 1 and 3 of the other draw.
    np.testing.assert_array_equal(rows_of(found), [0, 1, 102, 103, 4, 5, 106, 107])
    np.testing.assert_array_equal(found.rewards, [[1, 0]] * 4)
    assert asked == [1]
    assert found.counts == {
        "sampled_tokens": 21,
        "turns": 0,
        "draws": 2,
        "replaced_groups": 2,
        "flat_groups": 0,
    }


def test_draws_go_on_until_every_group_has_a_gradient():
    found = fill(draw_of(0), lambda i: draw_of(i, i))
    np.testing.assert_array_equal(rows_of(found)[:6], [102, 103, 204, 205, 306, 307])
    assert found.counts["draws"] == draws.MAX_DRAWS == 4
    assert (found.counts["replaced_groups"], found.counts["flat_groups"]) == (3, 1)


def test_a_step_without_flat_groups_draws_once():
    first = draw_of(0, 0, 1, 2, 3)
    found = fill(first, lambda i: pytest.fail("drawn again"))
    np.testing.assert_array_equal(rows_of(found), np.arange(ROWS))
    assert found.counts["draws"] == 1 and found.counts["replaced_groups"] == 0


def test_a_group_that_was_not_scored_is_replaced_and_never_taken():
    valid = np.ones((GROUPS, SAMPLES), bool)
    valid[0] = False
    found = fill(draw_of(0, 0, 1, 2, 3, valid=valid), lambda i: draw_of(i, 0, 2, valid=valid))
    np.testing.assert_array_equal(rows_of(found), [104, 105, *range(2, 8)])
    assert found.valid.all()


def test_the_first_draw_is_left_as_it_was():
    first = draw_of(0)
    fill(first, lambda i: draw_of(i, 0, 1, 2, 3))
    assert not first.rewards.any()
    np.testing.assert_array_equal(rows_of(first), np.arange(ROWS))
