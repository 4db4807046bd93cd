"""Trains one configuration.

python -m experiments.train --config=configs/quickstart.py --config.rl.steps=50 --workdir=DIR
"""

import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from experiments import cli
from trace_jax.loop import train
from trace_jax.parallel import is_first
from trace_jax.report import write_report

CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.")
WORKDIR = flags.DEFINE_string("workdir", None, "Run folder; made if missing.")
RESUME = flags.DEFINE_bool("resume", False, "Go on from the newest checkpoint in --workdir.")


def main():
    config = cli.config_of(CONFIG)
    print(cli.header(config), file=sys.stderr)
    result = train(config, Path(WORKDIR.value), resume=RESUME.value)
    if not is_first():
        return
    line = cli.summary(result, None)
    line["report"] = str(write_report(Path(WORKDIR.value), line))
    cli.print_json(line)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    cli.run(main)
