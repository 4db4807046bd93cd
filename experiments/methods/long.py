"""Does a method collapse when RL goes on for long? See README.md."""

from experiments.studies import SMALL, SMALLER, study

STEPS = 240  # naive FP4 of the paper's models collapses at about 150
OVERRIDES = (*SMALLER, ("rl.steps", STEPS), ("rollout.engine_noise", 0.01))
METHODS = ("naive", "qat", "trace_all", "bf16", "trace", "w4a16", "tis")
ROWS = [(m, m, {}) for m in METHODS]


def get_config():
    return study(SMALL, ROWS, overrides=OVERRIDES, name="long")
