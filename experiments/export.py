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
from trace_jax.metrics import read_metrics
from trace_jax.pretrained import export_files
from trace_jax.runs import VERSIONS

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
    out = Path(OUT.value or folder / f"export-{FORMAT.value}")
    params = jax.device_get(state["train"].params)
    files, facts = export_files(config.init.checkpoint), run_facts(config, folder, step)
    trace_jax.save_checkpoint(out, config.model, params, FORMAT.value, files=files, facts=facts)
    cli.print_json({"out": str(out), "format": FORMAT.value, "step": step})


def run_facts(config, folder: Path, step: int) -> dict:
    """What the model card says of the run."""
    p, versions = config.precision, json.loads((folder / VERSIONS).read_text())
    facts = {
        "run": folder.name,
        "began from": config.init.checkpoint or "random parameters",
        "task": ", ".join(name for name, *_ in config.task.datasets),
        "algorithm": config.rl.algorithm,
        "step": step,
        "mode": config.mode,
        "formats of FP4 rollouts": f"weights {p.weights}, activations {p.activations}, KV {p.kv}",
        "seed": config.seed,
        "code": versions["git_commit"] or "not in a repository",
        "hardware": versions["hardware"],
    }
    for row in read_metrics(folder):
        if row["step"] == step - 1:
            facts["reward of the last step"] = f"{row['reward/mean']:.3f}"
    return facts


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
