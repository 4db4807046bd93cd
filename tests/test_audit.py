"""The audit names the first place where the codes of rollout and trainer part."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.audit import ORDER, Parting, first_parting, first_rows
from trace_jax.fp4 import MXFP4, NVFP4, LayerPrecision
from trace_jax.model import Guidance
from trace_jax.model.sites import Codes
from trace_jax.rollout import Rollout

LAYERS, ROWS, LENGTH = 3, 3, 6
LENGTHS = np.array([6, 4, 5], np.int32)
POW2 = NVFP4.replace(outer="pow2")
PRECISION = (LayerPrecision(POW2, POW2, POW2, POW2, POW2),) * LAYERS
SHAPES = {"k": (2, 16), "v": (2, 16), "expert_in": (1, 32), "expert_mid": (2, 32)}
ONE, TWO = 56, 64  # E4M3 bytes of 1.0 and 2.0


def codes_of() -> dict[str, Codes]:
    """Code 3 (1.5) everywhere, block scale 1, outer scale 4."""

    def one(rows, width):
        shape = (LAYERS, ROWS, LENGTH, rows)
        return Codes(
            np.full((*shape, width), 3, np.uint8),
            np.full((*shape, width // 16), ONE, np.uint8),
            np.full((*shape, 1), 4.0, np.float32),
            np.ones((*shape, 1), np.uint8),
        )

    return {site: one(*shape) for site, shape in SHAPES.items()}


def rollout_of(audit) -> Rollout:
    return Rollout(
        tokens=jnp.arange(ROWS * LENGTH, dtype=jnp.int32).reshape(ROWS, LENGTH),
        prompt_length=jnp.full(ROWS, 2),
        length=jnp.asarray(LENGTHS),
        logp=jnp.zeros((ROWS, LENGTH)),
        mask=jnp.zeros((ROWS, LENGTH), bool),
        finished=jnp.zeros(ROWS, bool),
        guidance=Guidance(
            {"k": jnp.arange(LAYERS * ROWS).reshape(LAYERS, ROWS)},
            jnp.ones((ROWS, LENGTH), bool),
            jnp.arange(ROWS),
        ),
        routes=jnp.zeros((LAYERS, ROWS, LENGTH, 2), jnp.int16),
        audit=audit,
    )


def planted(*places, base=None) -> dict[str, Codes]:
    """Codes with one more at each (site, place)."""
    codes = codes_of() if base is None else base
    for site, place in places:
        codes[site].codes[place] += 1
    return codes


def parting(trainer, audit=None, precision=PRECISION) -> Parting | None:
    return first_parting(rollout_of(codes_of() if audit is None else audit), trainer, precision)


def test_identical_codes_do_not_part():
    assert parting(codes_of()) is None


def test_a_flipped_code_is_named_with_both_values_and_scales():
    audit = planted(("expert_mid", (1, 2, 3, 1, 20)))
    audit["expert_mid"].scale_bytes[1, 2, 3, 1, 1] = TWO  # of the block that holds element 20
    found = parting(codes_of(), audit)
    assert found == Parting(
        layer=1,
        site="expert_mid",
        row=2,
        position=3,
        index=(1, 20),
        rollout_code=4,
        trainer_code=3,
        rollout_value=2.0 * 2.0 * 4.0,
        trainer_value=1.5 * 1.0 * 4.0,
        rollout_scale=8.0,
        trainer_scale=4.0,
    )
    assert type(found.layer) is int and type(found.index[1]) is int, "they go into JSON"


def test_layers_come_before_sites_and_sites_in_order_of_computation():
    late, early = ("expert_mid", (0, 0, 4, 0, 0)), ("k", (1, 0, 0, 0, 0))
    assert parting(planted(late, early))[:2] == (0, "expert_mid")
    assert ORDER == ("k", "v", "expert_in", "expert_mid")
    same_layer = [(site, (1, 0, 0, 0, 0)) for site in reversed(ORDER)]
    assert [parting(planted(*same_layer[:n])).site for n in (1, 2, 3, 4)] == [*reversed(ORDER)]


def test_the_earliest_token_of_any_row_is_named():
    trainer = planted(("v", (0, 0, 3, 0, 0)), ("v", (0, 2, 1, 1, 5)), ("v", (0, 1, 1, 0, 9)))
    found = parting(trainer)
    assert (found.position, found.row, found.index) == (1, 1, (0, 9))


@pytest.mark.parametrize("place", [(0, 0, 5, 0, 0), (0, 1, 3, 0, 0), (0, 2, 4, 1, 2)])
def test_the_last_sampled_token_and_padding_are_not_compared(place):
    assert parting(planted(("k", place))) is None


def test_plus_and_minus_zero_do_not_part():
    sides = [codes_of(), codes_of()]
    for side, code in zip(sides, (0, 8), strict=True):
        side["k"].codes[0, 0, 0, 0, 0] = code
    assert parting(*sides) is None


def test_sites_that_only_one_side_quantizes_are_not_compared():
    trainer = planted(("expert_in", (0, 0, 0, 0, 0)))
    audit = codes_of()
    del audit["expert_in"]
    assert parting(trainer, audit) is None


def test_the_block_length_is_that_of_the_layers_format():
    """An MXFP4 block has 32 elements: element 20 lies in block 0, scale byte 127 is 1."""
    precision = (*PRECISION[:2], dataclasses.replace(PRECISION[2], expert_in=MXFP4))
    audit = planted(("expert_in", (2, 0, 0, 0, 20)))
    for side in (audit, trainer := codes_of()):
        side["expert_in"].scale_bytes[2] = [127, 0]
    found = parting(trainer, audit, precision)
    assert (found.rollout_value, found.trainer_value, found.rollout_scale) == (8.0, 6.0, 4.0)


def test_first_rows_cuts_every_field_on_its_own_axis():
    rollout = first_rows(rollout_of(codes_of()), 2)
    assert rollout.tokens.shape == (2, LENGTH) and rollout.length.tolist() == [6, 4]
    assert rollout.routes.shape == (LAYERS, 2, LENGTH, 2)
    assert rollout.guidance.sites["k"].tolist() == [[0, 1], [3, 4], [6, 7]]
    assert rollout.guidance.version.tolist() == [0, 1]
    assert rollout.audit["k"].codes.shape == (LAYERS, 2, LENGTH, 2, 16)
