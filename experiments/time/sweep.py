"""Where does the time go? See README.md."""

from experiments.studies import study

OVERRIDES = (("rl.steps", 20),)
ROWS = [(m, m, {}) for m in ("bf16", "naive", "qat", "trace", "trace_codes", "trace_all")]
PARTS = ("sync", "prompts", "rollout", "reward", "ledger", "train")
COLUMNS = (
    *((f"{part}, s", f"seconds_{part}", 1) for part in PARTS),
    ("tokens/s", "tokens_per_second", 0),
    ("guidance bytes a token", "guidance_bytes_per_token", 0),
    ("all, s", "seconds", 0),
)


def get_config():
    return study("configs/study_50m.py", ROWS, columns=COLUMNS, overrides=OVERRIDES)
