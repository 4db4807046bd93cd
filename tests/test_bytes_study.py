"""The arithmetic of experiments/bytes: what a band costs, and which plans are on the front."""

import functools

import numpy as np
import pytest

from experiments.bytes import coding, pareto


def test_the_entropy_of_a_fair_coin_is_a_bit_and_of_a_certainty_none():
    assert coding.entropy(0.5, 0.5) == 1.0
    assert coding.entropy(1.0, 0.0) == 0.0


def test_a_band_costs_its_symbols_and_leaves_what_crossed_outside_of_it():
    middle, width = np.array([1.0]), np.array([0.25])
    sent = np.array([0.1, 0.9, 1.1, 1.9])  # two of them inside, one on each side
    assert coding.banded(sent, sent, middle, width) == (1.5, 0.0)
    own = np.array([0.1, 1.1, 0.9, 0.8])  # those inside are mended, the last one is not
    assert coding.banded(sent, own, middle, width) == (1.5, 0.25)


def test_the_nearest_midpoint_decides():
    middle, width = np.array([1.0, 2.0]), np.array([0.1, 0.1])
    sent = np.array([1.95, 1.05, 1.5, 5.0])
    bits, wrong = coding.banded(sent, sent, middle, width)
    assert (bits, wrong) == (1.5, 0.0)  # shares: half outside, a quarter below and above


def test_the_bound_is_a_bit_at_a_midpoint_and_nothing_far_from_it():
    at = coding.bound(np.array([1.0]), np.array([1.0]), np.array([0.01]))
    far = coding.bound(np.array([2.0]), np.array([1.0]), np.array([0.01]))
    assert at == pytest.approx(1.0) and far < 1e-9


@functools.cache
def measured() -> list[dict]:
    return coding.measure(0.01, rows=16)


def test_parity_checks_send_no_positions_and_leave_nothing_where_they_hold():
    rows = {r["scheme"]: r for r in measured()}
    few, many = rows["checks for 10% in doubt"], rows["checks for 25% in doubt"]
    assert few["bits"] < many["bits"] < rows["within 0.05 of a step"]["bits"]
    assert many["codes_differ"] == many["unsolved"] == 0 < few["unsolved"]
    assert many["bits"] > rows["lower bound"]["bits"]
    # 16 scales of a row of 256 go as 2 bytes; the sites' sizes are those of the plan
    assert many["kib_35b"] == pytest.approx(
        (many["bits"] + many["scale_bits"]) * (40 * 6144 + 10 * 1024) / 8 / 1024
    )


def test_no_scheme_beats_the_bound_and_wider_bands_cost_more_and_leave_less():
    rows = {r["scheme"]: r for r in measured()}
    bands = [rows[f"within {w:g} of a step"] for w in coding.ABSOLUTE]
    assert all(r["bits"] > rows["lower bound"]["bits"] > 0 for r in bands)
    assert all(a["bits"] < b["bits"] for a, b in zip(bands, bands[1:], strict=False))
    assert bands[0]["codes_differ"] > bands[1]["codes_differ"] > bands[3]["codes_differ"] == 0
    one_bit = rows["one bit a value"]
    per_value = (1 + one_bit["scale_bits"]) / 8 / 1024
    assert one_bit["kib_35b"] == pytest.approx(per_value * (40 * 6144 + 10 * 1024))


def test_the_front_has_the_plans_that_none_beats_at_as_few_bytes():
    plan = lambda size, gap: {"bytes": size, "gaps": [gap]}
    found = [plan(0, 0.5), plan(10, 0.6), plan(10, 0.4), plan(20, 0.4), plan(30, 0.1)]
    assert pareto.front(found) == [found[0], found[2], found[4]]


def test_every_plan_of_the_three_studies_is_there_once_with_its_seeds():
    found = pareto.plans()
    assert len({(p["label"], p["bytes"]) for p in found}) == len(found)
    assert all(len(p["gaps"]) == 3 for p in found)
    assert {"qat (no guidance)", "trace", "one bit", "four bits, last:0.5"} <= {
        p["label"] for p in found
    }
