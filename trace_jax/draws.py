"""Rollouts of a step with their rewards, and DAPO's dynamic sampling over them.

DAPO (arXiv 2503.14476, section 3.2) draws until every group carries a gradient. Here that is
bounded: after MAX_DRAWS what is still flat stays, without loss, and is counted.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.rl.advantages import informative_groups
from trace_jax.rollout import Rollout

MAX_DRAWS = 4
STRIDE = 1 << 24  # between the steps that two draws of one step pass for


class Draw(NamedTuple):
    """A rollout of P prompts with G samples each.

    `rewards` FP32 [P, G], `valid` bool [P, G]; `counts` {metric: number}, among them
    "sampled_tokens".
    """

    rollout: Rollout
    rewards: np.ndarray
    valid: np.ndarray
    counts: dict[str, float]


def fill(first: Draw, draw: Callable[[int], Draw]) -> Draw:
    """`first` with groups of further draws in place of those without a gradient.

    Args:
      draw: the number of a draw, from 1, to a draw of other prompts at the same weights.

    Returns:
      The draw to learn from. Its counts are the first one's, but for sampled tokens, which
      are of all draws, and {"draws", "replaced_groups", "flat_groups"}. Audit rows stay the
      first draw's: compare codes on that one.
    """
    rollout, rewards, valid = first.rollout, first.rewards.copy(), first.valid.copy()
    tokens, draws, replaced = first.counts["sampled_tokens"], 1, 0
    flat = _flat(rewards, valid)
    while flat.size and draws < MAX_DRAWS:
        new = draw(draws)
        draws, tokens = draws + 1, tokens + new.counts["sampled_tokens"]
        good = np.setdiff1d(np.arange(len(new.rewards)), _flat(new.rewards, new.valid))
        here, there = flat[: good.size], good[: flat.size]
        rollout = with_groups(rollout, new.rollout, here, there, rewards.shape[1])
        rewards[here], valid[here] = new.rewards[there], new.valid[there]
        replaced += here.size
        flat = _flat(rewards, valid)
    counts = {"draws": draws, "replaced_groups": replaced, "flat_groups": flat.size}
    return Draw(rollout, rewards, valid, {**first.counts, "sampled_tokens": tokens, **counts})


def _flat(rewards, valid) -> np.ndarray:
    """Indices of the groups that carry no gradient."""
    return np.flatnonzero(~np.asarray(informative_groups(jnp.asarray(rewards), jnp.asarray(valid))))


def with_groups(a: Rollout, b: Rollout, here, there, samples: int) -> Rollout:
    """`a` with its groups `here` replaced by the groups `there` of `b`; audit rows stay."""
    source = np.arange(a.tokens.shape[0])
    taken = np.zeros(source.shape, bool)
    for p, q in zip(here, there, strict=True):
        rows = slice(p * samples, (p + 1) * samples)
        source[rows], taken[rows] = np.arange(q * samples, (q + 1) * samples), True
    return _mixed(a, b, jnp.asarray(source), jnp.asarray(taken))


@jax.jit
def _mixed(a: Rollout, b: Rollout, source, taken) -> Rollout:
    def pick(axis):
        def one(x, y):
            rows = taken.reshape((1,) * axis + (-1,) + (1,) * (x.ndim - axis - 1))
            return jnp.where(rows, jnp.take(y, source, axis=axis), x)

        return one

    fields = ("tokens", "prompt_length", "length", "logp", "mask", "finished")
    guidance = a.guidance.replace(
        sites=jax.tree.map(pick(1), a.guidance.sites, b.guidance.sites),
        recorded=pick(0)(a.guidance.recorded, b.guidance.recorded),
        version=pick(0)(a.guidance.version, b.guidance.version),
    )
    return a.replace(
        **{name: pick(0)(getattr(a, name), getattr(b, name)) for name in fields},
        guidance=guidance,
        routes=pick(1)(a.routes, b.routes),
    )
