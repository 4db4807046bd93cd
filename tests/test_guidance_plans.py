"""Guidance plans: what they cost, which layers and sites they name, what is refused."""

import numpy as np
import pytest

from trace_jax import fp4
from trace_jax.fp4 import MXFP4, GuidancePlan, SiteShape

KIB = 1024


class Qwen35B:
    """The shape of Qwen3.5-35B-A3B: experts in all 40 layers, full attention in every fourth."""

    num_layers = 40

    def site_shapes(self):
        attention = tuple(range(3, 40, 4))
        kv = SiteShape(attention, 2, 256)
        return {"expert_in": SiteShape(tuple(range(40)), 1, 2048), "k": kv, "v": kv}


# --- bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kib", "plan"),
    [
        (45.0, GuidancePlan(layers="all", sites=("expert_in",), bits=4)),
        (5.625, GuidancePlan(layers="all", sites=("k", "v"), bits=4)),
        (7.5, GuidancePlan(layers="last:0.5", sites=("expert_in",))),
        (0.9375, GuidancePlan(layers="last:0.5", sites=("k", "v"))),
        (8.4375, GuidancePlan()),
        (5.625, GuidancePlan(sites=("expert_in",), scale_bits=2)),
        (2.5, GuidancePlan(sites=("expert_in",), bits=0)),
        (7.5, GuidancePlan(layers="last:20", sites=("expert_in",))),
        (0.0, fp4.NO_GUIDANCE),
    ],
)
def test_bytes_per_token_of_the_35b_shape(kib, plan):
    """The table of method section 3, exactly."""
    assert fp4.guidance_bytes_per_token(Qwen35B(), plan) == kib * KIB


def test_blocks_of_32_halve_the_bytes_of_the_scales():
    plan = GuidancePlan(layers="all", sites=("expert_in",), bits=4)
    assert fp4.guidance_bytes_per_token(Qwen35B(), plan, MXFP4) == 2048 * 40 * (4 + 8 / 32) / 8


def test_a_site_without_a_planned_layer_is_left_out():
    shapes = Qwen35B().site_shapes()
    plan = GuidancePlan(layers="first:5", sites=("expert_in", "expert_mid", "k"))
    assert plan.site_layers(shapes, 40) == {"expert_in": (0, 1, 2, 3, 4), "k": (3,)}
    assert GuidancePlan(layers="first:3", sites=("k",)).site_layers(shapes, 40) == {}


# --- plans ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ("all", (0, 1, 2, 3, 4)),
        ("none", ()),
        ("first:2", (0, 1)),
        ("last:2", (3, 4)),
        ("last:0", ()),
        ("last:0.6", (2, 3, 4)),
        ("first:1.0", (0, 1, 2, 3, 4)),
        ([4, 0, 0], (0, 4)),
        (np.array([1]), (1,)),
        ("0,3", (0, 3)),
        ((), ()),
    ],
)
def test_select_layers_understands(spec, layers):
    assert fp4.select_layers(spec, 5) == layers


@pytest.mark.parametrize(
    "spec", ["last", "last:", "last:6", "first:-1", "middle:2", "last:inf", "last:nan", "last:1.5"]
)
def test_select_layers_says_what_to_write(spec):
    with pytest.raises(ValueError, match="write all, none, first:N, last:N with N a count up to 5"):
        fp4.select_layers(spec, 5)


@pytest.mark.parametrize("spec", [3, [1.5], ["one"], None])
def test_select_layers_refuses_what_is_no_list_of_indices(spec):
    with pytest.raises(ValueError, match="write all, none"):
        fp4.select_layers(spec, 5)


@pytest.mark.parametrize("spec", [[5], [-1], "7"])
def test_select_layers_knows_how_many_layers_there_are(spec):
    with pytest.raises(ValueError, match="the model has layers 0 to 4"):
        fp4.select_layers(spec, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sites": ("expert_in", "q")}, r"sites \['q'\] are unknown; write some of expert_in"),
        ({"bits": 2}, "bits is 2; write 0, 1 or 4"),
        ({"scale_bits": 4}, "scale_bits is 4; write 8, 2 or 1"),
        ({"rounding": "copy"}, "rounding is 'copy'; write nearest or replay"),
        ({"rounding": "replay"}, "needs the rollout's whole codes; write bits=4, not 1"),
        ({"on_stale": "ignore"}, "on_stale is 'ignore'; write obey, fade or drop"),
        ({"guard": 0.6}, "guard is 0.6; write None or a width"),
        ({"guard": 0.0}, "guard is 0.0"),
        ({"guard": float("nan")}, "guard is nan"),
        ({"fade": 1.0}, "fade is 1.0; write a factor between 0 and 1"),
        ({"fade": float("nan")}, "fade is nan"),
        ({"layers": 5}, "layers is 5; write last:0.5, all, none"),
    ],
)
def test_a_bad_plan_gets_one_line_that_says_what_to_write(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        GuidancePlan(**changes)
    assert "\n" not in str(error.value)


def test_plans_from_lists_are_hashable():
    plan = GuidancePlan(layers=[1, 2], sites=["k"])
    assert (plan.layers, plan.sites) == ((1, 2), ("k",)) and isinstance(hash(plan), int)


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"bits": 0}, "nearest"),
        ({"bits": 1}, "one_bit"),
        ({"bits": 4}, "four_bit"),
        ({"bits": 4, "rounding": "replay"}, "replay"),
    ],
)
def test_the_plan_names_the_trainers_rounding(changes, mode):
    assert GuidancePlan(**changes).mode == mode
