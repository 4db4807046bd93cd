"""Runs a study: every method and seed of its sweep.py, then its table and picture.

    python -m experiments.sweep --config=experiments/cached_depth/sweep.py

Rows go to results.jsonl beside the file, the table into its README.md, the picture to
results.png. What is there already at the same settings is not run again, nor what another study
has run; a run that was interrupted goes on from its checkpoint, one that failed is a row with its
error and is tried again. All runs of one model and task begin with the same warm start, that of
seed 0; the seeds of a row run in one process, which compiles once.
"""

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from absl import flags
from ml_collections import config_flags
from tqdm import tqdm

from experiments import cli, results, rows
from experiments.studies import ROOT, Run, runs_of
from trace_jax.checkpoint import Checkpointer
from trace_jax.config import to_dict

CONFIG = config_flags.DEFINE_config_file("config", None, "A study's sweep.py.")
JOBS = flags.DEFINE_integer("jobs", 1, "Runs at a time on each device.", lower_bound=1)
WORKDIR = flags.DEFINE_string("workdir", "runs/sweeps", "Folder of the runs.")
OUT = flags.DEFINE_string("out", None, "Folder of the results; that of --config by default.")
ONLY = flags.DEFINE_multi_string("only", [], "Label to run, once for each; all by default.")

COMMAND = (sys.executable, "-m", "experiments.train")


class RunFailed(ValueError):
    """A training process ended with an error; the message is its last line."""


def devices() -> list[str]:
    """Ids of the GPUs that may be used, or one empty id for a machine without."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [d for d in given.split(",") if d] or [""]
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu") or not shutil.which("nvidia-smi"):
        return [""]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return [str(i) for i in range(listed.stdout.count("GPU "))] or [""]


def environment(device: str, jobs: int) -> dict[str, str]:
    """What a run on `device` needs: its own GPU, a share of the memory, compiled programs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trace_jax" / "jax"
    env = {"JAX_COMPILATION_CACHE_DIR": str(cache)} | os.environ
    if device:
        env |= {
            "CUDA_VISIBLE_DEVICES": device,
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / jobs:.3f}",
        }
    return env


def train(arguments: list[str], env: dict[str, str]) -> Iterator[dict]:
    """Trains in a process of its own: the JSON lines of experiments.train as they come.

    Raises:
      RunFailed: with the last line of the process. KeyboardInterrupt: it was stopped.
    """
    command = [*COMMAND, *arguments]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=said, text=True) as run,
    ):
        yield from (json.loads(line) for line in run.stdout if line.startswith("{"))
        if run.wait() == cli.STOPPED:
            raise KeyboardInterrupt
        if run.returncode:
            said.seek(0)
            raise RunFailed((said.read().strip().splitlines() or ["no output"])[-1])


def warm_folder(run: Run, workdir: Path) -> Path:
    """Where the warm start lies that this run shares with its like."""
    c = run.config
    same = {k: to_dict(c)[k] for k in ("model", "task", "warmup", "init", "data_seed")}
    same["balance"] = c.rl.balance_coef
    key = hashlib.blake2b(json.dumps(same).encode(), digest_size=6).hexdigest()
    return workdir / f"warm-{key}"


def run_folder(run: Run, workdir: Path) -> Path:
    return workdir / f"{rows.settings_key(run.config)}-{run.name}"


class Sweep:
    """The runs of a study on the devices of this machine."""

    def __init__(self, out: Path, workdir: Path, jobs: int):
        self.out, self.workdir, self.jobs = out, workdir, jobs
        self.path = out / "results.jsonl"
        self.slots: queue.Queue[str] = queue.Queue()
        self.count = 0
        for device in devices() * jobs:
            self.slots.put(device)
            self.count += 1

    def missing(self, runs: list[Run]) -> list[Run]:
        """Runs without a row; rows of failures are taken out, so that they run again."""
        kept, keys = [], {self._key(rows.head_of(r)) for r in runs}
        for row in results.read_rows(self.path):
            if "error" not in row or self._key(row) not in keys:
                kept.append(row)
        results.write_rows(self.path, kept)
        have = {self._key(row) for row in kept if "label" in row}
        return [r for r in runs if self._key(rows.head_of(r)) not in have]

    def borrow(self, runs: list[Run]) -> None:
        """Takes over the rows that another study has of the same settings and seed."""
        known = {}
        for path in sorted((ROOT / "experiments").glob("*/results.jsonl")):
            for row in results.read_rows(path):
                if "label" in row and "error" not in row:
                    known[row["settings"], row["seed"]] = row
        for run in runs:
            head = rows.head_of(run)
            if found := known.get((head["settings"], head["seed"])):
                results.append_row(self.path, found | head)

    @staticmethod
    def _key(row: dict) -> tuple:
        return row.get("settings"), row.get("label"), row["seed"]

    def run(self, runs: list[Run]) -> None:
        """Warm starts first, then the runs label by label; rows are written as runs end."""
        cold = {warm_folder(r, self.workdir): r for r in runs if r.config.warmup.steps}
        jobs = [(self._warm, (folder, r)) for folder, r in cold.items() if not self._warmed(folder)]
        by_label = itertools.groupby(sorted(runs, key=lambda r: r.label), lambda r: r.label)
        groups = {label: list(group) for label, group in by_label}
        order = [groups[label] for label in dict.fromkeys(r.label for r in runs)]
        with (
            tqdm(total=len(jobs) + len(runs), desc="runs", disable=None) as bar,
            concurrent.futures.ThreadPoolExecutor(self.count) as pool,
        ):
            for batch in (jobs, [(self._seeds, (group,)) for group in order]):
                ahead = [pool.submit(work, *given) for work, given in batch]
                try:
                    for done in concurrent.futures.as_completed(ahead):
                        bar.update(done.result())
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise

    @staticmethod
    def _warmed(folder: Path) -> bool:
        return not Checkpointer(folder / "warmup", 1).empty()

    @contextlib.contextmanager
    def _device(self):
        device = self.slots.get()
        try:
            yield environment(device, self.jobs)
        finally:
            self.slots.put(device)

    def _warm(self, folder: Path, run: Run) -> int:
        """The warm start of a row, by seed 0; returns how many jobs that was."""
        flags_ = [*run.flags, "--config.seed=0", "--warm_start", f"--workdir={folder}"]
        with self._device() as env:
            list(train(flags_, env))
        return 1

    def _seeds(self, runs: list[Run]) -> int:
        """The runs of one row, which differ in the seed; returns how many they were."""
        first = runs[0]
        named = str(run_folder(first, self.workdir))
        arguments = [
            *first.flags,
            f"--workdir={named.removesuffix(f'-{first.seed}')}",
            f"--seeds={','.join(str(r.seed) for r in runs)}",
        ]
        if first.config.warmup.steps:
            arguments.append(f"--config.warmup.init_from={warm_folder(first, self.workdir)}")
        waiting = {r.seed: r for r in runs}
        try:
            with self._device() as env:
                for summary in train(arguments, env):
                    run = waiting.pop(summary["seed"])
                    row = rows.row_of(run, run_folder(run, self.workdir), summary)
                    results.append_row(self.path, row)
        except RunFailed as failure:
            for run in waiting.values():
                results.append_row(self.path, rows.head_of(run) | {"error": str(failure)})
        return len(runs)


def report(sweep, runs: list[Run], out: Path) -> str:
    """Writes the table into README.md and draws the picture; returns the table."""
    wanted = {(rows.settings_key(r.config), r.label, r.seed) for r in runs}
    mine = [r for r in results.read_rows(out / "results.jsonl") if Sweep._key(r) in wanted]
    labels = [label for label, *_ in sweep.rows]
    shown = rows.table(mine, labels, sweep.columns)
    results.replace_section(out / "README.md", sweep.name, shown)
    rows.draw(mine, labels, out / f"{sweep.name}.png", out.name)
    return shown


def main():
    sweep = CONFIG.value
    out = Path(OUT.value or Path(config_flags.get_config_filename(flags.FLAGS["config"])).parent)
    runs = runs_of(sweep)
    if unknown := set(ONLY.value) - {r.label for r in runs}:
        raise ValueError(f"--only names no row: {', '.join(sorted(unknown))}")
    chosen = [r for r in runs if not ONLY.value or r.label in ONLY.value]
    study = Sweep(out, Path(WORKDIR.value), JOBS.value)
    study.borrow(study.missing(chosen))
    study.run(study.missing(chosen))
    print(report(sweep, runs, out))
    mine = {(rows.settings_key(r.config), r.label, r.seed) for r in chosen}
    found = [r for r in results.read_rows(study.path) if Sweep._key(r) in mine]
    failed = [f"{r['label']}, seed {r['seed']}: {r['error']}" for r in found if "error" in r]
    cli.print_json({"results": str(study.path), "rows": len(found), "failed": failed})
    if failed:
        sys.exit(cli.FAILED)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
