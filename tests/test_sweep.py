"""Studies: their runs, rows, tables, and a real sweep that is killed and goes on."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import results, rows, sweep
from experiments.studies import COLUMNS, runs_of, study
from trace_jax.config import freeze
from trace_jax.metrics import read_metrics
from trace_jax.trainer import Trainer

FAST = "--xla_backend_optimization_level=0"  # compiling is most of the time
ROOT = Path(__file__).resolve().parent.parent
STUDIES = sorted(p.parent.name for p in (ROOT / "experiments").glob("*/sweep.py"))
TINY = """
from trace_jax.config import default


def get_config():
    config = default(
        vocab_size=259, num_layers=2, hidden=16, num_heads=2, num_kv_heads=1, head_dim=8,
        expert_dim=16,
    )
    config.task.datasets = (("spell_backward", 1.0, (("min_word_len", 3), ("max_word_len", 4))),)
    config.task.max_prompt, config.task.max_response = 16, 3
    config.warmup.steps, config.warmup.batch_size = 2, 4
    config.rl.steps, config.rl.prompts_per_step, config.rl.samples = 2, 2, 2
    config.eval.problems, config.eval.samples = 4, 1
    config.ledger.audit_rows, config.checkpoint.every = 1, 0
    return config
"""
SWEEP = """
from experiments.studies import study


def get_config():
    rows = [("plain", "qat", {}), ("guided", "trace_all", {"guidance.layers": "last:0.5"})]
    return study("FOLDER/tiny.py", rows, seeds=2)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "sweep.py").write_text(SWEEP.replace("FOLDER", str(tmp_path)))
    (tmp_path / "README.md").write_text(
        "# Study\n\n<!-- results -->\nold\n<!-- /results -->\nend\n"
    )
    return tmp_path


def runs(folder, own=(("guided", "trace_all", {"guidance.layers": "last:0.5"}),), **settings):
    return runs_of(study(f"{folder}/tiny.py", own, **settings))


# --- what a study says -----------------------------------------------------------------


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_runs_that_can_work_and_a_page_for_its_table(name):
    config = importlib.import_module(f"experiments.{name}.sweep").get_config()
    found = runs_of(config)
    assert len(found) == config.seeds * len(config.rows) >= 2
    assert {(r.label, r.seed) for r in found} == {
        (label, seed) for label, *_ in config.rows for seed in range(config.seeds)
    }
    page = (ROOT / "experiments" / name / "README.md").read_text()
    assert f"python -m experiments.sweep --config=experiments/{name}/sweep.py" in page
    assert "<!-- results -->" in page and "<!-- /results -->" in page


def test_there_are_studies():
    assert {"methods", "cached_depth", "bytes", "kv", "staleness", "early_noise", "dense"} < set(
        STUDIES
    )


def test_settings_of_a_row_beat_those_of_its_method(folder):
    (run,) = runs(folder, seeds=1, overrides=(("rollout.engine_noise", 0.01),))
    assert run.config.guidance.layers == "last:0.5", "the default, and yet given"
    assert run.config.guidance.sites == ("expert_in", "expert_mid", "k", "v")
    assert run.config.rollout.engine_noise == 0.01
    assert "--config.guidance.layers=last:0.5" in run.flags and run.name == "guided-0"


def test_a_bad_study_is_refused_before_anything_runs(folder):
    with pytest.raises(ValueError, match="labels repeat: a, a"):
        runs(folder, (("a", "qat", {}), ("a", "bf16", {})))
    with pytest.raises(ValueError, match="did you mean 'trace_all'"):
        runs(folder, (("a", "trace_al", {}),))
    with pytest.raises(ValueError, match=r"no configuration file .*gone\.py"):
        runs_of(study("gone.py", [("a", "qat", {})]))


def test_runs_of_one_model_share_a_warm_start_and_other_models_do_not(folder):
    own = (("a", "qat", {}), ("b", "trace", {}), ("c", "qat", {"model.hidden": 32}))
    found = {(r.label, r.seed): sweep.warm_folder(r, folder) for r in runs(folder, own, seeds=2)}
    assert found["a", 0] == found["b", 0] == found["a", 1] != found["c", 0]


def test_programs_are_shared_among_seeds_alone(folder):
    eight = (
        "rl.prompts_per_step",
        "eval.problems",
        "warmup.batch_size",
    )  # one a device of the tests
    (run,) = runs(folder, seeds=1, overrides=tuple((path, 8) for path in eight))
    first = Trainer(run.config, folder / "0")
    other = dataclasses.replace(run.config, seed=1)
    twin = first.again(other, folder / "1")
    assert twin.learner is first.learner and twin.actor.engine is first.actor.engine
    assert (twin.config.seed, twin.actor.config.seed, first.actor.config.seed) == (1, 1, 0)
    assert twin.checkpoints.directory == folder / "1" / "checkpoints"
    assert twin.queue is not first.queue
    with pytest.raises(ValueError, match="programs are shared among seeds alone"):
        first.again(dataclasses.replace(other, data_seed=1), folder / "1")


def test_a_row_outlives_settings_that_are_added_with_a_default(folder):
    (run,) = runs(folder, seeds=1)
    key = rows.settings_key(run.config)
    moved = dataclasses.replace(run.config.warmup, init_from="elsewhere")
    same = dataclasses.replace(run.config, seed=3, warmup=moved)
    assert rows.settings_key(same) == key
    guidance = dataclasses.replace(run.config.guidance, bits=4)
    assert rows.settings_key(dataclasses.replace(run.config, guidance=guidance)) != key
    told = rows._not_default(run.config)
    assert told["guidance"] == {"sites": ("expert_in", "expert_mid", "k", "v")}
    assert told["model"]["hidden"] == 16 and "distributed" not in told


# --- devices ---------------------------------------------------------------------------


def test_each_device_has_its_slots_and_each_job_its_memory(monkeypatch, folder):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert sweep.devices() == ["2", "5"]
    study_ = sweep.Sweep(folder, folder, 2)
    assert [study_.slots.get() for _ in range(study_.count)] == ["2", "5", "2", "5"]
    env = sweep.environment("5", 2)
    assert (env["CUDA_VISIBLE_DEVICES"], env["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == ("5", "0.450")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert sweep.devices() == [""]
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in sweep.environment("", 2)


# --- rows and tables -------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards, value",
    [
        ([0.2] * 20, False),
        ([0.1, 0.4] + [0.5] * 16 + [0.3, 0.2], False),  # the last tenth is 0.25: exactly half
        ([0.1, 0.4] + [0.5] * 16 + [0.2, 0.2], True),
        ([], False),
        ([0.0, 0.0, 0.0], False),
    ],
)
def test_collapse_is_an_end_below_half_of_the_best(rewards, value):
    assert rows.collapsed(rewards) == value


def test_a_curve_has_at_most_fifty_points_and_keeps_the_mean():
    assert rows.curve([1.0, 2.0]) == [1.0, 2.0] and rows.curve([]) == []
    long = rows.curve(list(range(100)))
    assert len(long) == 50 and long[0] == 0.5 and long[-1] == 98.5


def test_a_table_has_means_over_seeds_and_counts_failures():
    good = [{"label": "a", "accuracy_after": v} for v in (0.25, 0.75)]
    bad = {"label": "a", "seed": 2, "error": "no memory"}
    text = rows.table([*good, bad], ["a", "b"], COLUMNS[:1])
    assert "| a | 2 (1 failed) | 0.500 ± 0.354 |" in text
    assert "| b | 0 | n/a |" in text
    assert "| a | 1 | 0.250 |" in rows.table(good[:1], ["a"], COLUMNS[:1]), "one has no spread"


def test_failures_run_again_and_rows_of_other_settings_stay(folder):
    found = runs(folder, seeds=2)
    heads = [rows.head_of(r) for r in found]
    old = heads[0] | {"settings": "other", "error": "of another time"}
    for row in (heads[0], heads[1] | {"error": "no memory"}, old):
        results.append_row(folder / "results.jsonl", row)
    study_ = sweep.Sweep(folder, folder, 1)
    assert study_.missing(found) == [found[1]]
    assert results.read_rows(folder / "results.jsonl") == [heads[0], old]


def test_a_row_of_another_study_is_taken_over_under_the_own_label(folder, monkeypatch):
    found = runs(folder, seeds=2)
    head = rows.head_of(found[0])
    theirs = folder / "experiments" / "theirs" / "results.jsonl"
    results.append_row(theirs, head | {"label": "of theirs", "accuracy_after": 0.5})
    results.append_row(theirs, rows.head_of(found[1]) | {"error": "no memory"})
    monkeypatch.setattr(sweep, "ROOT", folder)
    study_ = sweep.Sweep(folder, folder, 1)
    study_.borrow(study_.missing(found))
    assert results.read_rows(study_.path) == [head | {"accuracy_after": 0.5}]
    assert study_.missing(found) == [found[1]], "a failure is nothing to take over"


def test_a_row_may_have_a_configuration_file_of_its_own(folder):
    (folder / "wide.py").write_text(TINY.replace("hidden=16", "hidden=32"))
    own = (("a", "qat", {}), ("b", "qat", {"base": f"{folder}/wide.py"}))
    plain, wide = runs(folder, own, seeds=1)
    assert (plain.config.model.hidden, wide.config.model.hidden) == (16, 32)
    assert wide.flags[0] == f"--config={folder}/wide.py" and "base" not in " ".join(wide.flags[1:])


def test_a_failed_run_is_a_row_with_its_last_line_and_the_others_go_on(folder, monkeypatch):
    """Without training: the process is replaced, the sweep is real."""
    calls = []

    def trained(arguments, env):
        calls.append(" ".join(arguments))
        yield {"seed": 0}
        if "method=trace_all" in calls[-1]:
            raise sweep.RunFailed("no memory")
        yield {"seed": 1}

    monkeypatch.setattr(sweep, "train", trained)
    monkeypatch.setattr(sweep.Sweep, "_warmed", staticmethod(lambda folder: True))
    monkeypatch.setattr(sweep, "devices", lambda: [""])
    monkeypatch.setattr(rows, "row_of", lambda run, folder, summary: rows.head_of(run))
    study_ = sweep.Sweep(folder, folder / "runs", 1)
    found = runs(folder, (("plain", "qat", {}), ("guided", "trace_all", {})), seeds=2)
    study_.run(found)
    errors = {(r["label"], r["seed"]): r.get("error") for r in results.read_rows(study_.path)}
    assert errors == {
        ("plain", 0): None,
        ("plain", 1): None,
        ("guided", 0): None,
        ("guided", 1): "no memory",
    }
    assert len(calls) == 2 and all("warmup.init_from=" in c for c in calls)
    assert all(f"--seeds={runs_}" in c for c, runs_ in zip(calls, ("0,1", "0,1"), strict=True))


def test_the_lines_of_a_process_come_as_they_are_said_and_its_failure_is_its_last_word(
    monkeypatch,
):
    script = "import sys; print('note'); print('{\"seed\": 4}', flush=True); sys.exit('no memory')"
    monkeypatch.setattr(sweep, "COMMAND", (sys.executable, "-c", script))
    lines = sweep.train([], dict(os.environ))
    assert next(lines) == {"seed": 4}
    with pytest.raises(sweep.RunFailed, match="^no memory$"):
        next(lines)


# --- a real one -------------------------------------------------------------------------


def start(folder):
    command = [sys.executable, "-m", "experiments.sweep", f"--config={folder}/sweep.py"]
    return subprocess.Popen(
        [*command, f"--workdir={folder}/runs"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_and_fills_its_page(folder):
    path = folder / "results.jsonl"
    first = start(folder)
    deadline = time.monotonic() + 600
    while len(results.read_rows(path)) < 2 and first.poll() is None:
        assert time.monotonic() < deadline, "no row came"
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    _, err = first.communicate()
    before = results.read_rows(path)
    assert len(before) in (2, 3), err[-2000:]

    second = start(folder)
    out, err = second.communicate(timeout=300)
    assert second.returncode == 0, err[-2000:]
    found = results.read_rows(path)
    assert found[: len(before)] == before, "what was there was not run again"
    assert {(r["label"], r["seed"]) for r in found} == {
        (label, seed) for label in ("plain", "guided") for seed in (0, 1)
    }
    for row in found:
        figures = ("accuracy_after", "accuracy_bf16", "gap_mean", "gap_mean_final", "k3_mean")
        assert all(row[name] is not None for name in figures)
        assert len(row["reward_curve"]) == len(row["entropy_curve"]) == 2
        assert row["hardware"].endswith("(cpu)") and row["jax"] and row["git_commit"]
        assert "experiments.train" in row["command"] and "seeds=" in row["command"]
        assert (row["guidance_bytes_per_token"] > 0) == (row["label"] == "guided")
        parts = {"sync", "prompts", "rollout", "reward", "ledger", "train"}
        assert all(row[f"seconds_{part}"] > 0 for part in parts)
    assert json.loads(out.splitlines()[-1]) == {"results": str(path), "rows": 4, "failed": []}
    page = (folder / "README.md").read_text()
    assert "| plain | 2 |" in page and "old" not in page and page.endswith("end\n")
    assert (folder / "results.png").read_bytes()[:4] == b"\x89PNG"
    warm = list((folder / "runs").glob("warm-*"))
    assert len(warm) == 1, "one warm start for all"
    run_folders = [p for p in (folder / "runs").iterdir() if p not in warm]
    assert all(len(read_metrics(p)) == 2 for p in run_folders) and len(run_folders) == 4
    assert freeze(json.loads((warm[0] / "config.json").read_text())).warmup.steps == 2
