"""What does an FP4 KV-cache cost, and what guides it? See README.md."""

from experiments.studies import study

KV_ONLY = {"precision.weights": "bf16", "precision.activations": "bf16"}

OVERRIDES = (("rollout.engine_noise", 0.01),)
ROWS = [
    ("bf16", "bf16", {}),
    ("experts FP4, KV BF16, qat", "qat", {"precision.kv": "bf16"}),
    ("experts BF16, KV NVFP4, qat", "qat", KV_ONLY),
    (
        "experts BF16, KV NVFP4, K and V guided",
        "trace_all",
        KV_ONLY | {"guidance.sites": ("k", "v")},
    ),
    ("all NVFP4, qat", "qat", {}),
    ("all NVFP4, K and V guided", "trace_all", {"guidance.sites": ("k", "v")}),
    ("KV MXFP4, qat", "qat", {"precision.kv": "mxfp4"}),
    ("KV MXFP4, all guided", "trace_all", {"precision.kv": "mxfp4"}),
]


def get_config():
    return study("configs/study_50m.py", ROWS, overrides=OVERRIDES)
