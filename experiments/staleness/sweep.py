"""What is guidance of an older policy version worth? See README.md."""

from experiments.studies import CHECKS, SMALL, SMALLER, study

OVERRIDES = (*SMALLER, ("rollout.engine_noise", 0.01))
LAGS = (1, 3, 8)
ROWS = [("qat, lag 0", "qat", {}), ("one bit, lag 0", "trace_all", {})]
ROWS += [(f"qat, lag {lag}", "qat", {"rl.max_version_lag": lag}) for lag in LAGS]
ROWS += [
    (
        f"one bit, lag {lag}, {rule}",
        "trace_all",
        {"rl.max_version_lag": lag, "guidance.on_stale": rule},
    )
    for lag in LAGS
    for rule in ("obey", "fade", "drop")
]
ROWS += [
    (f"parity checks, lag {lag}, obey", "trace_all", CHECKS | {"rl.max_version_lag": lag})
    for lag in LAGS
]


def get_config():
    return study(SMALL, ROWS, seeds=3, overrides=OVERRIDES)
