"""The cache's formats where answers are ten times as long. See README.md."""

from experiments.studies import study

TASK = (("spiral_matrix", 1.0, (("min_n", 8), ("max_n", 8))),)  # 64 digits and their spaces
OVERRIDES = (
    ("task.datasets", TASK),
    ("task.max_prompt", 144),
    ("task.max_response", 128),
    ("warmup.steps", 1500),
    ("warmup.wrong_answers", 0.5),
    ("rl.steps", 20),
    ("eval.problems", 128),
    ("rollout.engine_noise", 0.01),
)
ROWS = [
    ("bf16", "bf16", {}),
    ("all NVFP4, qat", "qat", {}),
    ("all NVFP4, K and V guided", "trace_all", {"guidance.sites": ("k", "v")}),
    ("all NVFP4, all guided", "trace_all", {}),
    ("KV FP8, qat", "qat", {"precision.kv": "fp8"}),
    ("KV MXFP4, qat", "qat", {"precision.kv": "mxfp4"}),
]


def get_config():
    return study("configs/study_50m.py", ROWS, overrides=OVERRIDES, name="long")
