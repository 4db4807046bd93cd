"""Kills, full disks and damage: no step is lost beyond the last save, no wrong state accepted.

CI kills three runs and three writers; TRACE_JAX_KILLS=20 python -m pytest tests/test_faults.py
kills 20 runs while they train and 20 writers while they save.
"""

import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from test_distributed import begin, environment, finish, saved, wait_for

from trace_jax.checkpoint import Checkpointer, CheckpointError
from trace_jax.config import MeshConfig
from trace_jax.metrics import read_metrics
from trace_jax.parallel import make_mesh, shard_params

ASKED = int(os.environ.get("TRACE_JAX_KILLS", "0"))
GROUPS = {"rl": {"steps": 10**6, "max_version_lag": 1}, "warmup": {"steps": 1}}
GROUPS |= {"checkpoint": {"every": 1, "keep": 2}, "eval": {"problems": 8, "samples": 1}}

WRITER = """
import sys
import numpy as np
import jax.numpy as jnp
from trace_jax.checkpoint import Checkpointer
saver = Checkpointer(sys.argv[1], keep=2)
step = saver.latest_step() or 0
print("at", step, flush=True)
while True:
    step += 1
    state = {"w": jnp.full((700, 700), step), "n": np.full(9, step), "s": step}
    saver.save(step, state, {"s": step})
    print("saving", step, flush=True)
"""


def read_until(process, word: str) -> str:
    """The first line of a process that holds `word`."""
    for line in process.stdout:
        if word in line:
            return line
    raise AssertionError(f"the process ended with {process.wait()} before {word!r}")


def kill(process) -> list[str]:
    """What it had still printed."""
    process.send_signal(signal.SIGKILL)
    return process.communicate()[0].splitlines()


def test_a_writer_killed_at_any_moment_leaves_its_last_save_whole(tmp_path):
    rng, last = random.Random(0), 0
    for _ in range(ASKED or 3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            env=environment(1),
            stdout=subprocess.PIPE,
            text=True,
        )
        started = int(read_until(process, "at").split()[1])
        assert started >= last, "a save that had been seen is gone"
        read_until(process, "saving")
        time.sleep(rng.random())
        lines = kill(process)
        begun = max([int(line.split()[1]) for line in lines if line.count(" ") == 1] + [started])
        saver = Checkpointer(tmp_path)
        last = saver.latest_step() or 0
        assert last >= begun - 1, "a save had begun, so the one before it was complete"
        if last:
            like = {"w": np.zeros((700, 700), np.int32), "n": np.zeros(9, np.int64), "s": 0}
            state, metadata = saver.restore(None, like)
            assert metadata == {"s": last} and state["s"] == last
            assert (state["w"] == last).all() and (state["n"] == last).all()
    assert last > 0 and len(saver.all_steps()) <= 2


@pytest.mark.skipif(not ASKED, reason="minutes: write TRACE_JAX_KILLS=20 to kill 20 runs")
def test_a_run_killed_at_any_moment_is_the_run_that_nobody_killed(tmp_path):
    """Bit for bit: metrics, parameters, optimizer, queue."""
    rng, folder = random.Random(1), tmp_path / "run"
    for _ in range(ASKED):
        process = begin(folder, 1, GROUPS)
        wait_for(process, "reward")
        time.sleep(2 * rng.random())
        process.kill()
        process.wait()
        made, done = len(read_metrics(folder)), Checkpointer(folder / "checkpoints").latest_step()
        print(f"killed after {made} steps, checkpoint {done}")
        assert made - 2 <= done <= made, "the save after the last step but one had begun"
    steps = made + 1
    for path in (folder, tmp_path / "straight"):
        finish(begin(path, 1, GROUPS | {"rl": GROUPS["rl"] | {"steps": steps}}))
    rows = [r.items() for r in map(without_clock, read_metrics(folder))]
    assert rows == [r.items() for r in map(without_clock, read_metrics(tmp_path / "straight"))]
    one, two = saved(folder), saved(tmp_path / "straight")
    assert one.keys() == two.keys() and any(name.startswith("queue") for name in one)
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name], err_msg=name)


def without_clock(row: dict) -> dict:
    clock = ("seconds/", "tokens_per_second")
    return {k: v for k, v in row.items() if not k.startswith(clock)}


def test_a_disk_that_fills_behind_the_run_stops_it_with_one_line(tmp_path, monkeypatch):
    """ENOSPC from the operating system while Orbax writes; the earlier save stands."""
    saver = Checkpointer(tmp_path)
    saver.save(1, {"w": np.arange(9)}, {})
    saver.wait()
    real = os.fsync

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    saver.save(2, {"w": np.arange(9) + 1}, {})
    with pytest.raises(CheckpointError, match="step 2 was not saved.*No space left") as error:
        saver.wait()
    assert "\n" not in str(error.value)
    monkeypatch.setattr(os, "fsync", real)
    assert os.listdir(tmp_path) == ["1"]
    assert saver.restore(None, {"w": np.zeros(9, int)})[0]["w"][3] == 3
    saver.save(2, {"w": np.arange(9) + 1}, {})
    assert saver.latest_step() == 2, "space came back"


def test_any_flipped_byte_of_any_file_is_refused(tmp_path):
    saver = Checkpointer(tmp_path)
    like = {"w": jax.numpy.arange(64.0), "n": 3}
    saver.save(4, like, {"s": 4})
    saver.wait()
    files = [p for p in (tmp_path / "4").rglob("*") if p.is_file() and p.stat().st_size]
    rng = random.Random(2)
    for path in files:
        whole = path.read_bytes()
        hurt = bytearray(whole)
        hurt[rng.randrange(len(hurt))] ^= 1 << rng.randrange(8)
        path.write_bytes(hurt)
        with pytest.raises(CheckpointError, match="is damaged"):
            saver.restore(None, like)
        path.write_bytes(whole)
    assert len(files) > 3 and saver.restore(None, like)[1] == {"s": 4}


def test_a_whole_training_state_moves_between_device_counts(tmp_path):
    """BR-130: written by 8 devices, taken over by 2, then by 1."""
    def laid_out(count, fill):
        rng = np.random.default_rng(0)
        weight = lambda *shape: (fill * rng.normal(size=shape)).astype(np.float32)
        params = {
            "embed": weight(64, 16),
            "layers": {"moe": {"gate_up": weight(2, 4, 32, 16), "down": weight(2, 4, 16, 16)}},
        }
        mesh = make_mesh(MeshConfig(data=-1, expert=min(count, 4)), jax.devices()[:count])
        return shard_params({"params": params, "mu": params, "version": np.int32(7 * fill)}, mesh)

    written = laid_out(8, 1)
    state = written
    for step, count in enumerate((8, 2, 1)):
        saver = Checkpointer(tmp_path)
        saver.save(step, state, {})
        like = laid_out(count, 0)
        state, _ = saver.restore(None, like)
        for a, b, target in zip(*map(jax.tree.leaves, (state, written, like)), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.sharding == target.sharding and len(a.sharding.device_set) == count
