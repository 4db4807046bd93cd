"""Exports the newest checkpoint of a run in the Hub's layout.

    python -m experiments.export --run=DIR --format=nvfp4 --out=DIR

Codes and block scales of the expert weights are those of the run's FP4 rollouts. So is the
outer scale in nvfp4-modelopt; nvfp4 (compressed-tensors) stores its reciprocal, which may move
it by one FP32 step.
"""

import json
from pathlib import Path

import jax
from absl import flags

import trace_jax
from experiments import cli
from trace_jax.config import freeze
from trace_jax.loop import Trainer

RUN = flags.DEFINE_string("run", None, "Run folder made by experiments.train or quickstart.")
FORMAT = flags.DEFINE_enum("format", "bf16", ["bf16", "nvfp4", "nvfp4-modelopt", "mxfp4"], "")
OUT = flags.DEFINE_string("out", None, "New folder; default RUN/export-FORMAT.")
flags.mark_flag_as_required("run")


def main():
    folder = Path(RUN.value)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no run; write --run=DIR with the folder of a run")
    config = freeze(json.loads((folder / "config.json").read_text()))
    check_format(config.precision, FORMAT.value)
    trainer = Trainer(config, folder)
    step, state, _ = trainer.restore(trainer.start(trainer.fresh_params()))
    facts = {"run": folder.name, "step": step, "mode": config.mode, "seed": config.seed}
    out = Path(OUT.value or folder / f"export-{FORMAT.value}")
    params = jax.device_get(state["train"].params)
    trace_jax.save_checkpoint(out, config.model, params, FORMAT.value, facts=facts)
    cli.print_json({"out": str(out), "format": FORMAT.value, "step": step})


def check_format(precision, format: str) -> None:
    """An FP4 export must be what the run rolled out with, in every layer."""
    if format == "bf16":
        return
    if precision.weights != format.removesuffix("-modelopt"):
        raise ValueError(
            f"the run rolled out with {precision.weights} weights; write --format=bf16, or "
            "the run's own"
        )
    if precision.bf16_layers != "none":
        raise ValueError(
            f"the run kept layers {precision.bf16_layers} in BF16, which FP4 exports do not "
            "support yet; write --format=bf16"
        )


if __name__ == "__main__":
    cli.run(main)
