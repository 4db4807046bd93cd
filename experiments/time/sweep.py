"""Where does the time go? See README.md."""

from experiments.studies import study

OVERRIDES = (("rl.steps", 20),)
ROWS = [(m, m, {}) for m in ("bf16", "naive", "qat", "trace", "trace_codes", "trace_all")]
PARTS = ("sync", "rollout", "ledger", "train")
COLUMNS = (
    *((f"{part}, s a step", f"step_{part}", 4) for part in PARTS),
    ("weights sent, bytes", "weight_bytes", 0),
    ("guidance bytes a token", "guidance_bytes_per_token", 0),
)


def get_config():
    return study("configs/study_50m.py", ROWS, seeds=1, columns=COLUMNS, overrides=OVERRIDES)
