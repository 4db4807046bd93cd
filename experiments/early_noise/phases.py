"""Guidance that begins late: QAT for the first half of RL, guided from there on. See README.md.

    python -m experiments.early_noise.phases --workdir=runs/phases

Both halves are runs of their own, of half the steps: the optimizer begins anew between them, in
the rows that do not change their method too. Rows go to phases.jsonl; what is there is not run
again.
"""

import dataclasses
import importlib
from pathlib import Path

from absl import flags
from tqdm import tqdm

from experiments import cli, results, rows
from experiments.studies import COLUMNS, Run, runs_of
from trace_jax.loop import train, warm

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the runs.")
SEEDS = flags.DEFINE_integer("seeds", 1, "Seeds a row.", lower_bound=1)
OUT = flags.DEFINE_string("out", "experiments/early_noise/phases.jsonl", "Result file.")

PHASES = (("qat", "qat"), ("qat", "trace_all"), ("trace_all", "trace_all"))
STUDY = "experiments.early_noise.sweep"


def label_of(first: str, second: str) -> str:
    return f"{first}, then {second}"


def halves(first: str, second: str, seed: int) -> list[Run]:
    """The two runs of a row; the second sees other problems than the first."""
    known = {r.label: r for r in runs_of(importlib.import_module(STUDY).get_config())}
    out = []
    for part, method in enumerate((first, second)):
        run = known[f"{method}, noise 0.01"]
        rl = dataclasses.replace(run.config.rl, steps=run.config.rl.steps // 2)
        # The warm start is one for all rows, whatever problems come after it.
        config = dataclasses.replace(run.config, seed=seed, data_seed=part, rl=rl)
        out.append(run._replace(label=label_of(first, second), seed=seed, config=config))
    return out


def measure(runs: list[Run], folder: Path, start: Path) -> dict:
    """Trains both halves from the warm start in `start`: the row of the second."""
    params = None
    for part, run in enumerate(runs):
        begin = dataclasses.replace(run.config.warmup, init_from=str(start))
        config = dataclasses.replace(run.config, warmup=begin)
        into = folder / f"{run.name}-{part}"
        result = train(config, into, resume=into.exists(), params=params)
        params = result.params
    row = rows.row_of(runs[-1], into, cli.summary(result, None))
    return row | {"method": run.label}


def main():
    folder, out = Path(WORKDIR.value), Path(OUT.value)
    have = {(r["label"], r["seed"]) for r in results.read_rows(out)}
    wanted = [(*pair, seed) for seed in range(SEEDS.value) for pair in PHASES]
    start = folder / "warm"
    warm(halves(*PHASES[0], 0)[0].config, start)  # at once, if it is there
    for first, second, seed in tqdm(wanted, desc="rows", disable=None):
        if (label_of(first, second), seed) not in have:
            row = measure(halves(first, second, seed), folder, start)
            results.append_row(out, row)
    found = results.read_rows(out)
    text = rows.table(found, [label_of(*pair) for pair in PHASES], COLUMNS)
    results.replace_section(out.parent / "README.md", "phases", text)
    print(text)
    cli.print_json({"results": str(out), "rows": len(found)})


if __name__ == "__main__":
    flags.mark_flag_as_required("workdir")
    cli.run(main)
