"""Two processes on loopback with four devices each against one process with eight."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import jax
import numpy as np
import pytest
from run_helpers import rows_of, tiny

from trace_jax import parallel
from trace_jax.checkpoint import Checkpointer
from trace_jax.config import ConfigError, DistributedConfig
from trace_jax.metrics import read_metrics
from trace_jax.parallel import processes

TESTS = Path(__file__).resolve().parent
GROUPS = {"rl": {"steps": 2}, "warmup": {"steps": 0}, "checkpoint": {"every": 1}}
TIMEOUT = 10  # seconds of silence of a dead process
PATIENCE = 560  # seconds until the tests give up on a process; compiling takes most of them


def environment(devices: int) -> dict:
    cache = jax.config.jax_compilation_cache_dir or os.environ["JAX_COMPILATION_CACHE_DIR"]
    return os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }


def begin(folder, devices: int, groups: dict) -> subprocess.Popen:
    """What it prints goes to a file beside its folder, its `log`: a full pipe would stop it."""
    command = [sys.executable, str(TESTS / "child_run.py"), str(folder), json.dumps(groups)]
    log = Path(f"{folder}-{uuid.uuid4().hex}.log")
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, env=environment(devices), stdout=out, stderr=subprocess.STDOUT
        )
    process.log = log
    return process


def wait_for(process: subprocess.Popen, word: str) -> None:
    """Until the process has printed `word`."""
    end = time.monotonic() + PATIENCE
    while word not in process.log.read_text():
        assert process.poll() is None, process.log.read_text()[-2000:]
        assert time.monotonic() < end, f"no {word!r} in {PATIENCE} s"
        time.sleep(0.05)


def begin_two(folder, **groups) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    member = lambda i: {"coordinator": address, "processes": 2, "process": i, "timeout": TIMEOUT}
    both = GROUPS | groups
    return [begin(folder, 4, both | {"distributed": member(i)}) for i in range(2)]


def finish(process: subprocess.Popen) -> str:
    try:
        process.wait(timeout=PATIENCE)
    finally:
        process.kill()
    out = process.log.read_text()
    assert process.returncode == 0, out[-2000:]
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process with eight devices."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return folder, finish(begin(folder, 8, GROUPS))


def saved(folder, what="checkpoints"):
    """Every leaf of the newest checkpoint, by name, as NumPy."""
    saver = Checkpointer(folder / what)
    leaves = json.loads(
        (saver.directory / str(saver.latest_step()) / "commit.json").read_text().split("\n")[1]
    )["leaves"]
    like = {name: np.zeros(shape, dtype) for name, (dtype, shape) in leaves.items()}
    return saver.restore(None, like)[0]


EXACT = ("reward/", "rollout/", "step", "weights/", "guidance/", "mismatch/tokens")
CLOSE = ("train/loss", "train/grad_norm", "train/entropy", "train/balance")


def assert_same_rows(one: list[dict], two: list[dict]) -> None:
    """Rewards and counts equal; losses but for the order in which processes sum gradients."""
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            if key.startswith(EXACT):
                assert a[key] == b[key], key
        for key in CLOSE:
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), key


def assert_same_saves(one, two) -> None:
    """Parameters and optimizer but for the order of FP32 sums, everything else exactly.

    The moments of one weight, whose gradient is a small rest of large terms, part by 1.4e-5.
    """
    first, second = saved(one), saved(two)
    assert first.keys() == second.keys()
    for name, value in first.items():
        if value.dtype == np.float32:
            size = max(np.linalg.norm(value), 1e-20)
            assert np.linalg.norm(value - second[name]) / size < 1e-4, name
        else:
            np.testing.assert_array_equal(value, second[name], err_msg=name)


def test_two_processes_are_one_run(alone, tmp_path):
    """The same losses and samples, and one writer.

    BR-156: three of the first step's eight prompts are too long, so that most rows of the second
    process have no loss; it makes the same steps.
    BR-155: each process draws the rows of four prompts; they are those of one process.
    """
    outs = [finish(process) for process in begin_two(tmp_path / "run")]
    folder = tmp_path / "run"
    assert_same_rows(rows_of(alone[0]), rows_of(folder))
    assert_same_saves(alone[0], folder)
    for name in ("tokens", "length"):  # of the rollout of the last policy
        one, two = saved(alone[0], "audit")[name], saved(folder, "audit")[name]
        np.testing.assert_array_equal(one, two)
    lines = [[x for x in out.splitlines() if x.startswith("step ")] for out in outs]
    assert len(lines[0]) == 2 and lines[1] == [], "one process reports"
    ends = {x for out in outs for x in out.splitlines() if x.startswith("finished")}
    assert ends == {alone[1].splitlines()[-1]}, "both know the result"


def test_a_dead_process_ends_the_other_and_the_run_goes_on(alone, tmp_path):
    """In bounded time, with a word on which one died; resumed by one process with 8 devices.

    BR-139: the data's position is the step, whatever the number of processes.
    """
    folder = tmp_path / "run"
    first, second = begin_two(folder, rl={"steps": 1000})
    try:
        wait_for(first, "step    1  reward")
        os.kill(second.pid, signal.SIGKILL)
        first.wait(timeout=TIMEOUT + 60)
    finally:
        first.kill()
        second.kill()
    out = first.log.read_text()
    assert first.returncode != 0
    assert "another task died" in out or "unhealthy" in out or "Connection" in out, out[-2000:]
    done = Checkpointer(folder / "checkpoints").latest_step()
    made = len(read_metrics(folder))
    assert made - 2 <= done <= made, "no step lost beyond the save that was under way"
    groups = GROUPS | {"rl": {"steps": made + 1}}
    assert "finished" in finish(begin(folder, 8, groups))
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == list(range(made + 1))
    assert_same_rows(rows_of(folder)[:2], rows_of(alone[0]))


# --- one process ------------------------------------------------------------------------


def test_settings_of_processes_are_checked_before_anything_is_joined():
    with pytest.raises(ConfigError, match="distributed.process is 2 of distributed.processes 2"):
        tiny(distributed={"coordinator": "a:1", "processes": 2, "process": 2})
    with pytest.raises(ConfigError, match="write host:port of the first process"):
        tiny(distributed={"processes": 2})


def test_no_cluster_is_one_line(monkeypatch):
    def initialize(**known):
        raise ValueError("coordinator_address should be defined.\nmore")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(ConfigError, match=r"is 'auto' and the processes did not meet \(coord") as e:
        parallel.join(DistributedConfig(coordinator="auto"))
    assert "\n" not in str(e.value)
    parallel.join(DistributedConfig())  # one process joins nothing


def test_a_refusal_of_the_first_process_reaches_all(monkeypatch):
    """Else the others would wait for it forever."""
    told = []

    def refuse():
        raise ValueError("the folder is not empty")

    monkeypatch.setattr(processes, "from_first", lambda a: told.append(a.copy()) or a)
    with pytest.raises(ValueError, match="the folder is not empty"):
        parallel.once(refuse)
    monkeypatch.setattr(processes, "is_first", lambda: False)
    monkeypatch.setattr(processes, "from_first", lambda a: told[0])
    with pytest.raises(ValueError, match="^the folder is not empty$"):
        parallel.once(refuse)
