"""Precision policy: rules resolve in order, and a rule without effect is an error."""

import pytest

from trace_jax import fp4
from trace_jax.fp4 import BF16_POLICY, MXFP4, NVFP4, LayerPrecision, PrecisionPolicy, Rule


def test_no_rules_mean_bf16_everywhere():
    assert BF16_POLICY.resolve(3) == (LayerPrecision(),) * 3


def test_weights_take_the_fp32_outer_scale_and_activations_the_power_of_two():
    (layer,) = PrecisionPolicy((Rule("*", "nvfp4"),)).resolve(1)
    assert layer.expert_weight == NVFP4
    assert layer.expert_in == layer.expert_mid == layer.k == layer.v == NVFP4.replace(outer="pow2")


def test_mxfp4_has_no_outer_scale_anywhere():
    (layer,) = PrecisionPolicy((Rule("*", "mxfp4"),)).resolve(1)
    assert layer == LayerPrecision(*[MXFP4] * 5)


def test_a_later_rule_overrides_an_earlier_one_in_its_layers_alone():
    policy = PrecisionPolicy(
        (
            Rule("*", "nvfp4"),
            Rule("expert_*", "bf16", layers="last:1"),
            Rule("k", "mxfp4", layers=(0, 2)),
        )
    )
    first, middle, last = policy.resolve(3)
    assert (first.k, middle.k, last.k) == (MXFP4, NVFP4.replace(outer="pow2"), MXFP4)
    assert first.expert_weight == middle.expert_weight == NVFP4
    assert last.expert_weight is last.expert_in is last.expert_mid is None
    assert last.v == NVFP4.replace(outer="pow2")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("expert_weights", "nvfp4"), "matches no tensor among expert_weight, expert_in"),
        (Rule("attention*", "nvfp4"), "matches no tensor"),
        (Rule("k", "nvfp4", layers="none"), "matches no layer"),
        (Rule("k", "nvfp4", layers="last:0"), "matches no layer"),
        (Rule("k", "nvfp4", layers=()), "matches no layer"),
        (Rule("k", "fp4"), "unknown FP4 format 'fp4'; write one of nvfp4, mxfp4, nvfp4_4over6"),
        (Rule("k", "nvfp4", layers=(4,)), "the model has layers 0 to 3"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(rule, message):
    with pytest.raises(ValueError, match=message):
        PrecisionPolicy((rule,)).resolve(4)


def test_every_site_of_guidance_can_have_a_format():
    assert set(fp4.SITES) < set(fp4.policy.TENSORS)
    (layer,) = PrecisionPolicy((Rule("*", "nvfp4_4over6"),)).resolve(1)
    assert all(getattr(layer, site).scale_rule == "four_over_six" for site in fp4.SITES)
