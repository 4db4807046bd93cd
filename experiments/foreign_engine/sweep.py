"""What if the rollout engine is not ours? See README.md."""

from experiments.studies import study

METHODS = ("naive", "qat", "trace", "trace_all")
NOISES = (0.0, 0.005, 0.01, 0.03, 0.1)
EXTRA = (  # where one bit may stop being enough
    ("tis", "tis", {}),
    ("trace_all, guard 0.2", "trace_all", {"guidance.guard": 0.2}),
    ("trace_all, replay", "trace_all", {"guidance.bits": 4, "guidance.rounding": "replay"}),
)
ROWS = [
    (f"{label}, noise {noise:g}", method, own | {"rollout.engine_noise": noise})
    for noise in NOISES
    for label, method, own in (*((m, m, {}) for m in METHODS), *(EXTRA if noise > 0.05 else ()))
]


def get_config():
    return study("configs/study_50m.py", ROWS, seeds=1)
