"""Trains one configuration.

python -m experiments.train --config=configs/quickstart.py --config.rl.steps=50 --workdir=DIR
"""

import dataclasses
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from experiments import cli
from trace_jax.config import Config
from trace_jax.loop import train, warm
from trace_jax.parallel import is_first
from trace_jax.report import write_report
from trace_jax.trainer import Trainer

CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.")
WORKDIR = flags.DEFINE_string("workdir", None, "Run folder; made if missing.")
RESUME = flags.DEFINE_bool("resume", False, "Go on from the newest checkpoint in --workdir.")
WARM = flags.DEFINE_bool("warm_start", False, "Only the warm start, for warmup.init_from.")
SEEDS = flags.DEFINE_list(
    "seeds", [], "One run a seed, in --workdir-SEED: compiled once, a JSON line each, no report."
)


def every_seed(config: Config, seeds: list[int]) -> None:
    """Runs that differ in their seed alone, one after the other with the same programs."""
    like = None
    for seed in seeds:
        own = dataclasses.replace(config, seed=seed)
        folder = Path(f"{WORKDIR.value}-{seed}")
        like = like.again(own, folder) if like else Trainer(own, folder)
        result = train(own, folder, resume=folder.exists(), like=like)
        cli.print_json({"seed": seed} | cli.summary(result, None))


def main():
    config = cli.config_of(CONFIG)
    print(cli.header(config), file=sys.stderr)
    if WARM.value:
        warm(config, WORKDIR.value)
        return
    if SEEDS.value:
        every_seed(config, [int(s) for s in SEEDS.value])
        return
    result = train(config, Path(WORKDIR.value), resume=RESUME.value)
    if not is_first():
        return
    line = cli.summary(result, None)
    line["report"] = str(write_report(Path(WORKDIR.value), line))
    cli.print_json(line)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    cli.run(main)
