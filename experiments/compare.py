"""Trains every mode from the same warm start and the same budget, and compares them.

python -m experiments.compare --config=configs/quickstart.py --seeds=3

Rows go to experiments/modes/results.jsonl; a mode and seed that is there already, at the
same settings, is not run again.
"""

import concurrent.futures
import hashlib
import json
import subprocess
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags
from tqdm import tqdm

from experiments import cli, results
from trace_jax.config import MODES, freeze, to_dict

CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds 0 to N - 1.")
COMPARED = flags.DEFINE_list("modes", list(MODES), "Modes to run.")
JOBS = flags.DEFINE_integer("jobs", 1, "Runs at a time.")
WORKDIR = flags.DEFINE_string("workdir", "runs/compare", "Folder of the runs.")
OUT = flags.DEFINE_string("out", "experiments/modes/results.jsonl", "Result file.")
METRICS = (
    ("accuracy under FP4", "accuracy_after", 3),
    ("accuracy in its own formats", "accuracy_own", 3),
    ("before RL, FP4", "accuracy_before", 3),
    ("mean gap", "mean_abs_logprob_gap", 4),
    ("KL (k3)", "kl_k3", 5),
    ("codes agree", "code_agreement", 4),
    ("guidance bytes a token", "guidance_bytes_per_token", 0),
    ("seconds", "seconds", 0),
)


def settings_key(config) -> str:
    """Hash of the configuration without mode, seed and where the warm start comes from."""
    tree = to_dict(config)
    for name in ("mode", "seed"):
        tree.pop(name)
    tree["warmup"].pop("init_from")
    return hashlib.blake2b(json.dumps(tree).encode(), digest_size=6).hexdigest()


def command(mode: str, seed: int, workdir: Path) -> list[str]:
    """This process's own --config flags, with mode, seed and warm start set."""
    given = [a for a in sys.argv[1:] if a.startswith("--config")]
    own = [f"--config.mode={mode}", f"--config.seed={seed}", f"--workdir={workdir}"]
    if mode != "bf16":
        own.append(f"--config.warmup.init_from={warm_folder(seed)}")
    resume = ["--resume"] if workdir.exists() else []
    return [sys.executable, "-m", "experiments.train", *given, *own, *resume]


def warm_folder(seed: int) -> Path:
    return run_folder("bf16", seed)


def run_folder(mode: str, seed: int) -> Path:
    return Path(WORKDIR.value) / f"{settings_key(freeze(CONFIG.value))}-{mode}-{seed}"


def run_one(mode: str, seed: int) -> dict:
    done = subprocess.run(
        command(mode, seed, run_folder(mode, seed)), capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"mode {mode}, seed {seed}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    config, out = freeze(CONFIG.value), Path(OUT.value)
    key, facts = settings_key(config), results.provenance()
    noise = config.rollout.engine_noise
    rows = [r for r in results.read_rows(out) if r["settings"] == key]
    have = {(r["mode"], r["seed"]) for r in rows}
    seeds = range(SEEDS.value)
    # bf16 runs make the warm starts, and post_hoc trains exactly as bf16 does.
    first = [("bf16", s) for s in seeds if ("bf16", s) not in have]
    trained = [m for m in COMPARED.value if m not in ("bf16", "post_hoc")]
    rest = [(m, s) for m in trained for s in seeds if (m, s) not in have]

    with (
        tqdm(total=len(first) + len(rest), desc="runs", disable=None) as bar,
        concurrent.futures.ThreadPoolExecutor(JOBS.value) as pool,
    ):

        def keep(job, line):
            modes = ("bf16", "post_hoc") if job[0] == "bf16" else job[:1]
            for mode in modes:
                row = {"settings": key, "mode": mode, "seed": job[1], "noise": noise, **line}
                if mode == "bf16":  # judged in BF16; its FP4 accuracy is post_hoc's
                    row["accuracy_after"] = None
                rows.append(row | facts)
                results.append_row(out, rows[-1])
            bar.update()

        for batch in (first, rest):
            futures = {pool.submit(run_one, *job): job for job in batch}
            for future in concurrent.futures.as_completed(futures):
                keep(futures[future], future.result())
    shown = table(rows, COMPARED.value)
    for page in (out.parent / "README.md", Path("README.md")):
        results.replace_section(page, f"modes, noise {noise:g}", shown)
    print(shown)
    cli.print_json({"results": str(out), "rows": len(rows)})


def table(rows: list[dict], modes) -> str:
    """Markdown: mean ± standard deviation over seeds, one row a mode."""
    lines = []
    for mode in modes:
        mine = [r for r in rows if r["mode"] == mode]
        cells = [results.mean_and_spread([r[k] for r in mine], d) for _, k, d in METRICS]
        lines.append([mode, str(len(mine)), *cells])
    return results.markdown_table(["mode", "seeds", *(name for name, _, _ in METRICS)], lines)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
