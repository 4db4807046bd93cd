"""Parity checks in place of bits, at the noise of half a BF16 step. See README.md."""

from experiments.studies import CHECKS, SMALL, SMALLER, study

OVERRIDES = (*SMALLER, ("rollout.engine_noise", 0.002))
ROWS = [
    ("qat (no guidance)", "qat", {}),
    ("one bit", "trace_all", {}),
    ("checks for 5 % in doubt", "trace_all", CHECKS),
]


def get_config():
    return study(SMALL, ROWS, overrides=OVERRIDES, name="small")
