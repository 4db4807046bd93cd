"""Where the time goes on two CPU cores, parity checks included. See README.md."""

from experiments.studies import CHECKS, SMALL, SMALLER, study
from experiments.time.sweep import COLUMNS, ROWS


def get_config():
    rows = [*ROWS, ("trace_all, parity checks", "trace_all", CHECKS)]
    return study(SMALL, rows, columns=COLUMNS, overrides=SMALLER, name="small")
