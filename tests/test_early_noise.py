"""Guidance that begins late: two halves of one run, and the row that they make."""

import dataclasses

import pytest
from run_helpers import share_compiled, tiny

from experiments.early_noise import phases
from experiments.studies import Run
from trace_jax.loop import train, warm
from trace_jax.metrics import read_metrics


@pytest.fixture(scope="module")
def shared():
    with pytest.MonkeyPatch.context() as patch:
        share_compiled(patch)
        yield


def test_halves_differ_in_method_and_problems_alone():
    first, second = (run.config for run in phases.halves("qat", "trace_all", 1))
    assert (first.method, second.method) == ("qat", "trace_all")
    assert (first.data_seed, second.data_seed) == (0, 1) and first.seed == second.seed == 1
    assert first.rl == dataclasses.replace(second.rl, steps=first.rl.steps)
    whole = phases.halves("trace_all", "trace_all", 0)
    assert whole[0].config == dataclasses.replace(whole[1].config, data_seed=0)


def test_the_second_half_goes_on_with_the_first_ones_policy(tmp_path, shared, monkeypatch):
    given, left = [], []

    def seen(*args, params, **kwargs):
        result = train(*args, params=params, **kwargs)
        given.append(params), left.append(result.params)
        return result

    monkeypatch.setattr(phases, "train", seen)
    config = tiny("qat", rl={"steps": 1}, checkpoint={"every": 0})
    later = tiny("trace", rl={"steps": 1}, checkpoint={"every": 0})
    runs = [Run("qat, then trace", 0, c, ()) for c in (config, later)]
    warm(config, tmp_path / "warm")
    row = phases.measure(runs, tmp_path, tmp_path / "warm")
    assert row["label"] == row["method"] == "qat, then trace" and row["seed"] == 0
    halves = [tmp_path / f"{run.name}-{part}" for part, run in enumerate(runs)]
    assert [len(read_metrics(folder)) for folder in halves] == [1, 1]
    assert given == [None, left[0]]
    again = phases.measure(runs, tmp_path, tmp_path / "warm")
    same = ("accuracy_before", "accuracy_after", "gap_mean", "reward_curve")
    assert {k: again[k] for k in same} == {k: row[k] for k in same}
