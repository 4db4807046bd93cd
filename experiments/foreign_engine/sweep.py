"""What if the rollout engine is not ours? See README.md."""

from experiments.studies import study

ROWS = [
    (f"{method}, noise {noise:g}", method, {"rollout.engine_noise": noise})
    for noise in (0.002, 0.01, 0.03)
    for method in ("naive", "tis", "qat", "trace", "trace_all")
]


def get_config():
    return study("configs/study_50m.py", ROWS)
