"""Replays one recorded rollout through the trainer and finds where codes first part."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.fp4 import formats
from trace_jax.ledger import canonical, fed_tokens
from trace_jax.model.sites import Codes
from trace_jax.rollout import Rollout
from trace_jax.rollout.record import map_rows

ORDER = ("k", "v", "expert_in", "expert_mid")  # as a layer computes them


class Parting(NamedTuple):
    """First place where the trainer's code differs from the rollout's.

    `row` is the sequence, `position` the token's place in it, `index` the element
    inside the site; the values are code x block scale x outer scale.
    """

    layer: int
    site: str
    row: int
    position: int
    index: tuple[int, ...]
    rollout_code: int
    trainer_code: int
    rollout_value: float
    trainer_value: float
    rollout_scale: float
    trainer_scale: float


def first_rows(rollout: Rollout, rows: int) -> Rollout:
    """The rollout's first `rows` sequences, without the guidance of the others."""
    return map_rows(lambda a, axis: a[(slice(None),) * axis + (slice(rows),)], rollout)


def first_parting(rollout: Rollout, trainer: dict[str, Codes], precision) -> Parting | None:
    """The first differing code, by layer, then site in order of computation, then token.

    Args:
      rollout: its `audit` holds the rollout's codes of the same rows.
      trainer: the trainer's, from `Learner.audit`.
      precision: LayerPrecision a layer, for the block lengths.

    Returns:
      None if all codes of the compared sites agree.
    """
    rows = next(iter(trainer.values())).codes.shape[1]
    fed = np.asarray(fed_tokens(rollout))[:rows]
    for layer in range(len(precision)):
        for site in ORDER:
            if site not in trainer or site not in rollout.audit:
                continue
            ours, theirs = (
                jax.tree.map(lambda a, i=layer: np.asarray(a[i]), side[site])
                for side in (trainer, rollout.audit)
            )
            differ = np.asarray(canonical(jnp.asarray(ours.codes))) != np.asarray(
                canonical(jnp.asarray(theirs.codes))
            )
            differ &= fed[..., None, None]
            if differ.any():
                # Earliest token of any row, so that what later tokens inherit comes later.
                places = np.argwhere(differ)
                place = places[np.lexsort((places[:, 0], places[:, 1]))[0]]
                fmt = getattr(precision[layer], site)
                return _parting(layer, site, tuple(int(i) for i in place), theirs, ours, fmt)
    return None


def _parting(layer, site, place, rollout: Codes, trainer: Codes, fmt) -> Parting:
    row, position, *index = place
    facts = []
    for side in (rollout, trainer):
        code = side.codes[place]
        block = (*place[:-1], place[-1] // fmt.block)
        scale = formats.decode_scale(jnp.asarray(side.scale_bytes[block]), fmt)
        scale = float(scale) * float(side.outer[(*place[:-1], 0)])
        facts.append((int(code), float(formats.decode_e2m1(jnp.asarray(code))) * scale, scale))
    (a_code, a_value, a_scale), (b_code, b_value, b_scale) = facts
    return Parting(
        layer, site, row, position, tuple(index), a_code, b_code, a_value, b_value, a_scale, b_scale
    )
