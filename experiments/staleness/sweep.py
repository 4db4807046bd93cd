"""How far may the policy move under one rollout's guidance? See README.md."""

from experiments.studies import study

OVERRIDES = (("rollout.engine_noise", 0.01),)
ROWS = [
    (f"{method}, {parts} optimizer steps a rollout", method, {"rl.minibatches": parts})
    for method in ("qat", "trace_all")
    for parts in (1, 2, 4, 8)
]


def get_config():
    return study("configs/study_50m.py", ROWS, overrides=OVERRIDES)
