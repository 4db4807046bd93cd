"""What if the rollout engine is not ours? See README.md."""

from experiments.studies import study

METHODS = ("naive", "qat", "trace", "trace_all")
ROWS = [
    (f"{method}, noise {noise:g}", method, {"rollout.engine_noise": noise})
    for noise in (0.0, 0.005, 0.01, 0.03, 0.1)
    for method in METHODS
]


def get_config():
    return study("configs/study_50m.py", ROWS, seeds=1)
