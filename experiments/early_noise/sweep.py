"""Does guidance mislead a policy that has hardly learned, and does noise help it? See README.md."""

from experiments.studies import SMALL, SMALLER, study

OVERRIDES = (*SMALLER, ("warmup.steps", 250))
METHODS = ("bf16", "naive", "qat", "trace", "trace_all")
ROWS = [(f"{m}, noise 0.01", m, {"rollout.engine_noise": 0.01}) for m in METHODS]
ROWS += [(f"{m}, noise 0", m, {}) for m in ("bf16", "naive")]
COLUMNS = (
    ("accuracy, FP4", "accuracy_after", 3),
    ("accuracy, BF16", "accuracy_bf16", 3),
    ("before RL, FP4", "accuracy_before", 3),
    ("entropy, mean", "entropy_mean", 3),
    ("entropy, final", "entropy_final", 3),
    ("mean gap", "gap_mean", 4),
    ("collapsed", "collapsed", 1),
)


def get_config():
    return study(SMALL, ROWS, seeds=3, columns=COLUMNS, overrides=OVERRIDES)
