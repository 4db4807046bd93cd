"""Exports the newest checkpoint of a run in the Hub's layout.

    python -m experiments.export --run=DIR --format=nvfp4 --out=DIR

Codes, block scales and outer scales of the expert weights are those of the run's FP4 rollouts.
nvfp4 (compressed-tensors) stores the outer scale's reciprocal, as its convention is.
"""

from pathlib import Path

from absl import flags

from experiments import cli
from trace_jax.exports import export_run

RUN = flags.DEFINE_string("run", None, "Run folder made by experiments.train or quickstart.")
FORMAT = flags.DEFINE_enum("format", "bf16", ["bf16", "nvfp4", "nvfp4-modelopt", "mxfp4"], "")
OUT = flags.DEFINE_string("out", None, "New folder; default RUN/export-FORMAT.")
flags.mark_flag_as_required("run")


def main():
    folder = Path(RUN.value)
    out = Path(OUT.value or folder / f"export-{FORMAT.value}")
    step = export_run(folder, out, FORMAT.value)
    cli.print_json({"out": str(out), "format": FORMAT.value, "step": step})


if __name__ == "__main__":
    cli.run(main)
