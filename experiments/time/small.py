"""The same on the quickstart's model, where more seeds are cheap. See README.md."""

from experiments.studies import SMALL, SMALLER, study
from experiments.time.sweep import COLUMNS, ROWS


def get_config():
    return study(SMALL, ROWS, columns=COLUMNS, overrides=SMALLER, name="small")
