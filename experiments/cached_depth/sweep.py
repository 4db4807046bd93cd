"""How many layers need guidance, and which? See README.md."""

from experiments.studies import study

OVERRIDES = (("rollout.engine_noise", 0.01),)
DEPTHS = ("last:0.25", "last:0.5", "last:0.75", "first:0.25", "first:0.5", "all")
ROWS = [("qat (no guidance)", "qat", {})]
ROWS += [(f"one bit, {depth}", "trace_all", {"guidance.layers": depth}) for depth in DEPTHS]


def get_config():
    return study("configs/study_50m.py", ROWS, overrides=OVERRIDES)
