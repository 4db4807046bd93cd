"""What each training mode means: formats of both sides, and the plan between them."""

import dataclasses

import helpers
import pytest

from trace_jax import modes
from trace_jax.config import MODES, Config
from trace_jax.fp4 import NO_GUIDANCE
from trace_jax.model import ModelConfig, planned_layers

SHAPE = ModelConfig(**helpers.SHAPE)
CONFIG = Config(model=SHAPE)
ALL = dict.fromkeys(("expert_weight", "expert_in", "expert_mid", "k", "v"), "nvfp4")
BF16 = dict.fromkeys(ALL)
W4A16 = ALL | {"expert_in": None, "expert_mid": None}
# mode: formats of the rollout, formats of the trainer, whether the trainer is guided.
TABLE = {
    "bf16": (BF16, BF16, False),
    "naive": (ALL, BF16, False),
    "post_hoc": (BF16, BF16, False),
    "qat": (ALL, ALL, False),
    "w4a16": (W4A16, W4A16, False),
    "quads": (ALL, W4A16, False),
    "trace": (ALL, ALL, True),
}


def names(layer) -> dict:
    """{tensor: name of its format, None for BF16} of one layer."""
    return {tensor: (fmt := getattr(layer, tensor)) and fmt.name for tensor in ALL}


def mode(name: str, **precision) -> modes.Mode:
    chosen = dataclasses.replace(CONFIG.precision, **precision)
    return modes.resolve(dataclasses.replace(CONFIG, mode=name, precision=chosen))


def test_the_table_has_every_mode():
    assert set(TABLE) == set(MODES)


@pytest.mark.parametrize("name", MODES)
def test_mode_has_the_formats_of_the_table(name):
    rollout, trainer, guided = TABLE[name]
    found = mode(name)
    assert [names(layer) for layer in found.rollout] == [rollout] * 4
    assert [names(layer) for layer in found.trainer] == [trainer] * 4
    assert (found.plan != NO_GUIDANCE) == guided
    assert bool(planned_layers(SHAPE, found.trainer, found.plan)) == guided


def test_post_hoc_trains_exactly_as_bf16():
    assert mode("post_hoc") == mode("bf16")


def test_trace_plans_the_last_half_of_the_layers():
    found = mode("trace")
    planned = planned_layers(SHAPE, found.trainer, found.plan)
    assert planned == {"expert_in": (2, 3), "k": (2, 3), "v": (2, 3)}


def test_w4a16_keeps_the_kv_format_of_the_config():
    for kv, expected in (("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("bf16", None)):
        found = names(mode("w4a16", kv=kv).trainer[0])
        assert (found["k"], found["v"], found["expert_weight"]) == (expected, expected, "nvfp4")


def test_layers_kept_in_bf16_are_so_on_both_sides():
    found = mode("trace", bf16_layers="last:1")
    for side in (found.rollout, found.trainer):
        assert [names(layer) for layer in side] == [ALL] * 3 + [BF16]


def test_quads_gives_the_rollouts_activations_a_second_pass_and_nothing_else():
    layer = mode("quads").rollout[0]
    shares = {t: getattr(layer, t).residual for t in ALL}
    assert shares == dict.fromkeys(ALL, 0.0) | {"expert_in": 0.5, "expert_mid": 0.5}
    kept = mode("quads", activations="bf16").rollout[0]
    assert kept.expert_in is None and kept.expert_mid is None


def test_activations_and_kv_have_a_power_of_two_outer_scale_and_weights_do_not():
    layer = mode("trace").rollout[0]
    assert {getattr(layer, t).outer for t in ("expert_in", "expert_mid", "k", "v")} == {"pow2"}
    assert layer.expert_weight.outer == "amax"


def test_deployed_formats_do_not_depend_on_the_mode():
    deployed = {modes.fp4_precision(dataclasses.replace(CONFIG, mode=m)) for m in MODES}
    assert deployed == {mode("qat").rollout}
