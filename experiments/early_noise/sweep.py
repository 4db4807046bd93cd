"""Does the noise of FP4 rollouts help early exploration? See README.md."""

from experiments.studies import study

OVERRIDES = (("rl.steps", 40),)
ROWS = [
    (f"{method}, noise {noise:g}", method, {"rollout.engine_noise": noise})
    for method in ("bf16", "naive", "trace_all")
    for noise in (0.0, 0.01, 0.03)
]
COLUMNS = (
    ("accuracy, FP4", "accuracy_after", 3),
    ("accuracy, BF16", "accuracy_bf16", 3),
    ("entropy, mean", "entropy_mean", 3),
    ("entropy, final", "entropy_final", 3),
    ("mean gap", "gap_mean", 4),
    ("collapsed", "collapsed", 1),
)


def get_config():
    return study("configs/study_50m.py", ROWS, columns=COLUMNS, overrides=OVERRIDES)
