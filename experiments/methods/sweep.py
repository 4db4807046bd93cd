"""Which method learns what, under FP4 inference? See README.md."""

from experiments.studies import study
from trace_jax.methods import METHODS

OVERRIDES = (("rollout.engine_noise", 0.01),)
ROWS = [(name, name, {}) for name in METHODS if name != "post_hoc"]  # bf16 shows both figures


def get_config():
    return study("configs/study_50m.py", ROWS, overrides=OVERRIDES)
