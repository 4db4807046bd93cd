"""The whole method in small, on a CPU: warm start, TRACE, post-hoc FP4, report.

    make quickstart

Trains configs/quickstart.py twice from one warm start: with FP4 rollouts and TRACE
guidance, and with BF16 rollouts whose final policy is then quantized (post-hoc).
"""

import dataclasses
import time
from pathlib import Path

from absl import flags

from configs.quickstart import get_config
from experiments import cli
from trace_jax.config import freeze
from trace_jax.loop import train
from trace_jax.report import write_report

SEED = flags.DEFINE_integer("seed", 0, "Seed of parameters and sampling.")
WORKDIR = flags.DEFINE_string("workdir", None, "Run folder; default runs/quickstart-TIME.")


def main():
    begun = time.perf_counter()
    name = WORKDIR.value or f"runs/quickstart-{time.strftime('%Y%m%d-%H%M%S')}"
    workdir = Path(name)
    config = dataclasses.replace(freeze(get_config()), seed=SEED.value, mode="trace")
    print(f"TRACE: NVFP4 rollouts, one bit a value from the last half of the layers -> {workdir}")
    result = train(config, workdir / "trace")
    print("post-hoc FP4: BF16 rollouts from the same warm start, quantized at the end")
    warm = dataclasses.replace(config.warmup, init_from=str(workdir / "trace"))
    rival = train(dataclasses.replace(config, mode="post_hoc", warmup=warm), workdir / "post_hoc")
    line = cli.summary(result, None)
    line["accuracy_post_hoc"] = round(rival.after["accuracy"], 4)
    line["seconds"] = round(time.perf_counter() - begun, 1)
    line["report"] = str(write_report(workdir / "trace", line))
    print(
        f"held-out accuracy under FP4 inference: {line['accuracy_before']:.3f} before, "
        f"{line['accuracy_after']:.3f} after TRACE, {line['accuracy_post_hoc']:.3f} after post-hoc "
        f"(which has {rival.own['accuracy']:.3f} in BF16)"
    )
    print(f"report: {line['report']}\ncheckpoint: {line['checkpoint']}")
    cli.print_json(line)


if __name__ == "__main__":
    cli.run(main)
