"""A run's newest policy as a checkpoint folder in the Hub's layout."""

import json
from pathlib import Path
from typing import Any

import jax

import trace_jax
from trace_jax.config import Config, ConfigError, PrecisionConfig, freeze
from trace_jax.metrics import read_metrics
from trace_jax.pretrained import export_files
from trace_jax.runs import CONFIG, VERSIONS
from trace_jax.trainer import Trainer


def export_run(folder: Path, out: Path, format: str) -> int:
    """Writes the newest checkpoint of the run in `folder` to `out`: the step that it is of.

    Tokenizer, template and generation settings go along; the model card states the run.

    Raises:
      ValueError: no run, or a format that its rollouts did not use.
    """
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} holds no run; write --run=DIR with the folder of a run")
    config = freeze(json.loads((folder / CONFIG).read_text()))
    check_format(config.precision, format)
    trainer = Trainer(config, folder)
    step, state, _ = trainer.restore(trainer.start(trainer.fresh_params()))
    params = jax.device_get(state["train"].params)
    files, facts = export_files(config.init.checkpoint), run_facts(config, folder, step)
    trace_jax.save_checkpoint(out, config.model, params, format, files=files, facts=facts)
    return step


def check_format(precision: PrecisionConfig, format: str) -> None:
    """An FP4 export must be what the run rolled out with, in every layer."""
    if format == "bf16":
        return
    if precision.weights != format.removesuffix("-modelopt"):
        raise ConfigError(
            f"the run rolled out with {precision.weights} weights; write --format=bf16, or "
            "the run's own"
        )
    if precision.bf16_layers != "none":
        raise ConfigError(
            f"the run kept layers {precision.bf16_layers} in BF16, which FP4 exports do not "
            "support yet; write --format=bf16"
        )


def run_facts(config: Config, folder: Path, step: int) -> dict[str, Any]:
    """What the model card says of the run."""
    p, versions = config.precision, json.loads((folder / VERSIONS).read_text())
    kv = p.kv + (f" but for the last {p.kv_window} tokens" if p.kv_window else "")
    kv += ", V rotated" if p.rotate_v else ""
    facts = {
        "run": folder.name,
        "began from": config.init.checkpoint or "random parameters",
        "task": ", ".join(name for name, *_ in config.task.datasets),
        "algorithm": config.rl.algorithm,
        "step": step,
        "mode": config.mode,
        "formats of FP4 rollouts": f"weights {p.weights}, activations {p.activations}, KV {kv}",
        "seed": config.seed,
        "code": versions["git_commit"] or "not in a repository",
        "hardware": versions["hardware"],
    }
    for row in read_metrics(folder):
        if row["step"] == step - 1:
            facts["reward of the last step"] = f"{row['reward/mean']:.3f}"
    return facts
