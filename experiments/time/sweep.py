"""Where does the time go? See README.md."""

from experiments.studies import CHECKS, study

# Few steps from random weights: where the time goes does not depend on what was learnt.
OVERRIDES = (("rl.steps", 8), ("warmup.steps", 0), ("eval.problems", 32), ("eval.samples", 1))
ROWS = [(m, m, {}) for m in ("bf16", "naive", "qat", "trace", "trace_codes", "trace_all")]
ROWS += [("trace_all, parity checks", "trace_all", CHECKS)]
PARTS = ("sync", "rollout", "ledger", "train")
COLUMNS = (
    *((f"{part}, s a step", f"step_{part}", 4) for part in PARTS),
    ("weights sent, bytes", "weight_bytes", 0),
    ("guidance bytes a token", "guidance_bytes_per_token", 0),
)


def get_config():
    return study("configs/study_50m.py", ROWS, seeds=1, columns=COLUMNS, overrides=OVERRIDES)
