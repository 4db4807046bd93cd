"""What does an FP4 KV-cache cost on SmolLM2 made into a MoE? See README.md."""

from experiments.kv.sweep import KV_ONLY
from experiments.studies import study

OVERRIDES = (("rollout.engine_noise", 0.01),)
ROWS = [
    ("bf16", "bf16", {}),
    ("experts FP4, KV BF16, qat", "qat", {"precision.kv": "bf16"}),
    ("experts BF16, KV NVFP4, qat", "qat", KV_ONLY),
    ("all NVFP4, qat", "qat", {}),
    ("all NVFP4, K and V guided", "trace_all", {"guidance.sites": ("k", "v")}),
    ("all NVFP4, all guided", "trace_all", {}),
]


def get_config():
    return study("configs/smollm2_moe.py", ROWS, overrides=OVERRIDES, name="smollm2")
