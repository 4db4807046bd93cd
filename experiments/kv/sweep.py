"""What does an FP4 KV-cache cost, and what guides it? See README.md."""

from experiments.studies import study

KV_ONLY = {"precision.weights": "bf16", "precision.activations": "bf16"}
WINDOW = {"precision.kv_window": 8}  # a larger one would hold whole responses, of 26 tokens at most

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
    ("KV FP8, qat", "qat", {"precision.kv": "fp8"}),
    ("window of 8, qat", "qat", WINDOW),
    ("window of 8, all guided", "trace_all", WINDOW),
    ("V rotated, qat", "qat", {"precision.rotate_v": True}),
    ("V rotated, all guided", "trace_all", {"precision.rotate_v": True}),
    ("KV MXFP4, qat", "qat", {"precision.kv": "mxfp4"}),
    ("KV MXFP4, all guided", "trace_all", {"precision.kv": "mxfp4"}),
]


def get_config():
    return study("configs/study_50m.py", ROWS, overrides=OVERRIDES)
