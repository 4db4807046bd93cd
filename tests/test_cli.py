"""The commands: what they print, what they refuse, and the audit of a real run's folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import audit, cli
from trace_jax.audit import ORDER
from trace_jax.checkpoint import Checkpointer
from trace_jax.config import freeze
from trace_jax.loop import Result
from trace_jax.metrics import read_metrics
from trace_jax.parallel import make_mesh
from trace_jax.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
KEYS = {
    "accuracy_before",
    "accuracy_after",
    "accuracy_own",
    "accuracy_bf16",
    "mean_abs_logprob_gap",
    "kl_k3",
    "code_agreement",
    "guidance_bytes_per_token",
    "seconds",
    "report",
    "checkpoint",
}
OVERRIDES = {
    "model.num_layers": 2,
    "model.hidden": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 16,
    "model.num_experts": 4,
    "model.expert_dim": 32,
    "task.max_response": 4,
    "warmup.steps": 1,
    "warmup.batch_size": 8,
    "rl.steps": 2,
    "rl.prompts_per_step": 4,
    "rl.samples": 2,
    "guidance.layers": "all",
    "eval.problems": 4,
    "eval.samples": 1,
    "ledger.audit_rows": 4,
}


# --- a whole command ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """`experiments.train` on one device at tiny size: (folder, finished process)."""
    folder = tmp_path_factory.mktemp("command") / "run"
    line = [f"--config.{key}={value}" for key, value in OVERRIDES.items()]
    head = [sys.executable, "-m", "experiments.train", "--config=configs/quickstart.py"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        # One device, compiled in half the time.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    run = subprocess.run(
        [*head, *line, f"--workdir={folder}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    return folder, run


def test_last_line_of_a_run_is_one_json_object(command):
    folder, run = command
    line = json.loads(run.stdout.splitlines()[-1])
    assert set(line) == KEYS
    last = read_metrics(folder)[-1]
    assert line["mean_abs_logprob_gap"] == last["mismatch/gap_mean"] > 0
    assert line["code_agreement"] == last["agreement/mean"] > 0.9
    assert line["guidance_bytes_per_token"] == 24
    assert 0 <= line["accuracy_before"] <= 1 and 0 <= line["accuracy_after"] <= 1
    assert Path(line["report"]).exists() and Path(line["checkpoint"]).is_dir()


def test_progress_is_one_line_a_step_on_standard_error(command):
    _, run = command
    lines = [line for line in run.stderr.splitlines() if line.startswith("step ")]
    assert len(lines) == 1 + 2  # the warm start, then two steps of RL
    assert all(word in lines[-1] for word in ("reward", "KL", "codes agree", "tokens/s"))


def test_run_folder_holds_the_overridden_config_and_its_command(command):
    folder, _ = command
    config = freeze(json.loads((folder / "config.json").read_text()))
    assert (config.model.hidden, config.rl.steps, config.guidance.layers) == (32, 2, "all")
    versions = json.loads((folder / "versions.json").read_text())
    assert "--config.rl.steps=2" in versions["command"]


# --- the audit ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def auditor(command):
    """Runs experiments.audit on the command's folder: (printed lines, its JSON)."""
    folder, _ = command
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trace_jax.trainer.make_mesh", lambda c: make_mesh(c, jax.devices()[:1]))
        patch.setattr(audit, "RUN", SimpleNamespace(value=str(folder)))
        made = []

        def trainer(config, workdir):  # compiled once
            made.extend([Trainer(config, workdir)] if not made else [])
            return made[0]

        patch.setattr(audit, "Trainer", trainer)

        def run(capsys):
            capsys.readouterr()
            audit.main()
            lines = capsys.readouterr().out.splitlines()
            return lines, json.loads(lines[-1])

        yield run, lambda: made[0]


def test_audit_prints_a_table_and_says_where_codes_part(auditor, capsys):
    lines, found = auditor[0](capsys)
    assert "step 2, mode trace, 4 sequences" in lines[0]
    assert lines[2].split() == ["layer", *sorted(ORDER), "routes"]
    table = np.array([[float(x) for x in line.split()] for line in lines[3:5]])
    np.testing.assert_array_equal(table[:, 0], [0, 1])
    assert (table[:, 1:5] > 0.9).all() and (table[:, 1:] <= 1).all()
    assert (found["parting"] is None) == (lines[-2] == "no code differs")
    assert (found["parting"] is None) == bool((table[:, 1:5] == 1).all())


def test_audit_names_a_planted_difference_with_both_values(auditor, capsys):
    run, trainer = auditor
    run(capsys)  # so that there is a trainer
    rollout = trainer().load_audit()
    codes = np.asarray(rollout.audit["k"].codes).copy()
    # Of the first site of the first layer at the first token: nothing can part before it.
    place = (0, 0, 0, 0, 5)
    old = int(codes[place])
    codes[place] = 6 if old == 2 else 2
    planted = rollout.replace(audit=rollout.audit | {"k": rollout.audit["k"]._replace(codes=codes)})
    store = Checkpointer(trainer().workdir / "audit", 1)
    store.save(2, planted, {"step": 2})
    store.wait()
    try:
        lines, found = run(capsys)
    finally:
        store.save(2, rollout, {"step": 2})
        store.wait()
    parting = found["parting"]
    where = {k: parting[k] for k in ("layer", "site", "row", "position", "index")}
    assert where == {"layer": 0, "site": "k", "row": 0, "position": 0, "index": [0, 5]}
    assert parting["rollout_code"] == codes[place] and parting["trainer_code"] != codes[place]
    value = {2: 1.0, 6: 4.0}[int(codes[place])]
    assert parting["rollout_value"] == pytest.approx(value * parting["rollout_scale"])
    text = "\n".join(lines)
    assert "first parting: layer 0, site k, sequence 0, token 0" in text
    assert f"rollout: code {parting['rollout_code']:2d}" in text


def test_audit_of_another_step_than_the_checkpoint_is_refused(auditor, capsys):
    """A run that was extended and stopped has a record of older parameters."""
    run, trainer = auditor
    run(capsys)
    rollout = trainer().load_audit()
    store = Checkpointer(trainer().workdir / "audit", 1)
    store.save(2, rollout, {"step": 1})
    store.wait()
    try:
        with pytest.raises(ValueError, match=r"recorded at step 1 and the newest checkpoint is of"):
            audit.main()
    finally:
        store.save(2, rollout, {"step": 2})
        store.wait()


def test_audit_of_a_folder_without_a_run_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(audit, "RUN", SimpleNamespace(value=str(tmp_path)))
    with pytest.raises(ValueError, match="holds no run; write --run=DIR"):
        audit.main()


# --- errors --------------------------------------------------------------------------------

# One process imports everything and forks for each way to end.
DRIVER = """
import json, os, sys
from experiments import cli
from trace_jax.checkpoint import CheckpointError
from trace_jax.config import ConfigError
from trace_jax.loop import TrainingStopped

ENDS = {
    "bad_config": ConfigError("rl.samples is 1;\\n  write 2"),
    "damaged": CheckpointError("7 is damaged"),
    "full_disk": OSError(28, "No space left on device", "runs/a"),
    "stopped": TrainingStopped("stopped at step 3; saved"),
    "second_ctrl_c": KeyboardInterrupt(),
    "defect": RuntimeError("a defect of ours"),
}

def main():
    raise ENDS[name]

for name in ENDS:
    child = os.fork()
    if not child:
        for target, suffix in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[1]}/{name}.{suffix}", os.O_WRONLY | os.O_CREAT), target)
        sys.argv = ["train"]
        cli.run(main)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([name, code]), flush=True)
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """{name: (exit code, standard error)} of commands that end in these exceptions."""
    folder = tmp_path_factory.mktemp("ends")
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    codes = dict(json.loads(line) for line in run.stdout.splitlines())
    assert not any(p.stat().st_size for p in folder.glob("*.out"))
    return {name: (code, (folder / f"{name}.err").read_text()) for name, code in codes.items()}


@pytest.mark.parametrize(
    "name, code, line",
    [
        ("bad_config", 2, "error: rl.samples is 1; write 2"),
        ("damaged", 2, "error: 7 is damaged"),
        ("full_disk", 2, "error: [Errno 28] No space left on device: 'runs/a'"),
        ("stopped", 130, "stopped at step 3; saved"),
        ("second_ctrl_c", 130, "stopped at once; --resume goes on from the newest checkpoint"),
    ],
)
def test_expected_errors_are_one_line_and_an_exit_code(ends, name, code, line):
    assert ends[name] == (code, f"{line}\n")


def test_a_defect_keeps_its_traceback(ends):
    code, text = ends["defect"]
    assert code == 1 and "Traceback" in text and "a defect of ours" in text


def test_summary_of_a_run_that_recorded_no_metric_is_still_json(tmp_path):
    scores = {"accuracy": 0.12345}
    result = Result({}, scores, scores, scores, scores, {}, tmp_path, 1.26)
    line = json.loads(json.dumps(cli.summary(result, None)))
    assert set(line) == KEYS
    assert (line["accuracy_before"], line["seconds"], line["report"]) == (0.1235, 1.3, None)
