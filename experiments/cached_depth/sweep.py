"""How many layers need guidance, and which? See README.md."""

from experiments.studies import study
from trace_jax.fp4 import SITES

OVERRIDES = (("rollout.engine_noise", 0.01),)
DEPTHS = ("last:0.125", "last:0.25", "last:0.5", "last:0.75", "first:0.25", "first:0.5", "all")
HALF = {"guidance.layers": "last:0.5", "guidance.bits": 4}
ROWS = [("qat (no guidance)", "qat", {})]
ROWS += [(f"one bit, {depth}", "trace_all", {"guidance.layers": depth}) for depth in DEPTHS]
ROWS += [
    (
        f"one bit, all but {site}",
        "trace_all",
        {"guidance.sites": tuple(s for s in SITES if s != site)},
    )
    for site in SITES
]
ROWS += [
    ("four bits, last:0.5", "trace_all", HALF),
    ("replay, last:0.5", "trace_all", HALF | {"guidance.rounding": "replay"}),
]


def get_config():
    return study("configs/study_50m.py", ROWS, overrides=OVERRIDES)
