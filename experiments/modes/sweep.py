"""Which mode learns? See README.md."""

from experiments.studies import study
from trace_jax.config import MODES

ROWS = [(mode, "", {"mode": mode}) for mode in MODES if mode != "post_hoc"]


def get_config():
    return study("configs/quickstart.py", ROWS)
