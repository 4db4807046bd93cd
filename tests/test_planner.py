"""Guidance under a budget: which candidates there are, and which of them is taken."""

import ast

import pytest
from helpers import MOE, SHAPE

from experiments import planner
from trace_jax.config import default, freeze
from trace_jax.fp4 import SITES, GuidancePlan, guidance_bytes_per_token
from trace_jax.model import ModelConfig

MODEL = ModelConfig(**SHAPE | {"hidden": 128, "expert_dim": 64, "head_dim": 32})


@pytest.mark.parametrize("budget", [24, 40, 96, 200, 1000])
def test_candidates_fit_and_one_layer_more_would_not(budget):
    found = planner.candidates(MODEL, budget)
    sizes = [guidance_bytes_per_token(MODEL, plan) for plan in found]
    assert sizes == sorted(sizes) and 0 < sizes[0] and sizes[-1] <= budget
    assert len({(p.sites, p.scale_bits, p.checks) for p in found}) == len(found)
    for plan in found:
        if plan.layers != "all":
            count = int(plan.layers.removeprefix("first:"))
            deeper = GuidancePlan(
                layers=f"first:{count + 1}",
                sites=plan.sites,
                scale_bits=plan.scale_bits,
                checks=plan.checks,
            )
            assert guidance_bytes_per_token(MODEL, deeper) > budget


def test_a_large_budget_has_every_encoding_of_every_set_of_sites_in_all_layers():
    found = planner.candidates(MODEL, 1e9)
    assert {p.layers for p in found} == {"all"}
    assert len(found) == len(planner.ENCODINGS) * len(planner.PLACES)
    assert GuidancePlan(layers="all", sites=SITES) in found


def test_a_budget_for_nothing_says_what_would_do():
    with pytest.raises(ValueError, match="11 bytes a token pays for no layer; write 12 or more"):
        planner.candidates(MOE, 11)
    assert {plan.sites for plan in planner.candidates(MOE, 12)} == {("k", "v")}


def test_the_least_gap_wins_and_of_equal_ones_the_fewest_bytes():
    few, more, most = (GuidancePlan(layers=f"first:{n}") for n in (1, 2, 3))
    assert planner.best({few: 0.3, more: 0.1, most: 0.2}) == more
    assert planner.best({few: 0.3, more: 0.104, most: 0.1}) == more
    assert planner.best({few: 0.3, more: 0.106, most: 0.1}) == most
    assert planner.best({few: 0.3, more: 9e-7, most: 0.0}) == more


@pytest.mark.parametrize(
    "plan",
    [
        GuidancePlan(),
        GuidancePlan(layers="first:2", sites=("k", "v"), checks=0.05, scale_bits=1),
        GuidancePlan(layers="all", sites=SITES),
    ],
)
def test_the_flags_make_the_plan(plan):
    tree = default(**SHAPE)
    for flag in planner.flags_of(plan).split(" --config.guidance."):
        name, _, value = flag.removeprefix("--config.guidance.").partition("=")
        if name:
            kind = type(getattr(GuidancePlan(), name))
            read = ast.literal_eval if kind is tuple else kind
            tree.guidance[name] = read(value.strip('"'))
    assert freeze(tree).guidance.plan() == plan
