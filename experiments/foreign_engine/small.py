"""The study on the quickstart's model, with more noise levels. See README.md."""

from experiments.studies import SMALL, SMALLER, study

METHODS = ("naive", "qat", "trace", "trace_all")
REPLAY = {"guidance.bits": 4, "guidance.rounding": "replay"}
ROWS = [
    (f"{method}, noise {noise:g}", method, {"rollout.engine_noise": noise})
    for noise in (0.01, 0.03, 0.1)
    for method in METHODS
]
ROWS += [(f"{m}, noise 0", m, {}) for m in ("naive", "qat")]
ROWS += [
    (
        "trace_all, guard 0.2, noise 0.1",
        "trace_all",
        {"rollout.engine_noise": 0.1, "guidance.guard": 0.2},
    ),
    ("trace_all, replay, noise 0.1", "trace_all", REPLAY | {"rollout.engine_noise": 0.1}),
    ("tis, noise 0.1", "tis", {"rollout.engine_noise": 0.1}),
]


def get_config():
    return study(SMALL, ROWS, seeds=3, overrides=SMALLER, name="small")
