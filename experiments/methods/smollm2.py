"""Which method learns what on SmolLM2 made into a MoE? See README.md."""

from experiments.studies import study

OVERRIDES = (("rollout.engine_noise", 0.01),)
ROWS = [(m, m, {}) for m in ("bf16", "naive", "qat", "w4a16", "trace", "trace_all")]


def get_config():
    return study("configs/smollm2_moe.py", ROWS, overrides=OVERRIDES, name="smollm2")
