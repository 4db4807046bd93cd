"""The cache's formats where answers are six times as long. See README.md."""

from experiments.studies import study

SENTENCES = (("min_words", 12), ("max_words", 16), ("min_rotation", 1), ("max_rotation", 1))
OVERRIDES = (
    ("task.datasets", (("caesar_cipher", 1.0, SENTENCES),)),
    ("task.max_prompt", 136),
    ("task.max_response", 116),
    ("warmup.steps", 500),
    ("warmup.batch_size", 64),
    ("warmup.wrong_answers", 0.5),
    ("rl.steps", 12),
    ("rl.prompts_per_step", 8),
    ("rl.remat", "full"),
    ("eval.problems", 128),
    ("eval.samples", 1),
    ("rollout.engine_noise", 0.01),
)
ROWS = [
    ("bf16", "bf16", {}),
    ("all NVFP4, qat", "qat", {}),
    ("all NVFP4, K and V guided", "trace_all", {"guidance.sites": ("k", "v")}),
    ("all NVFP4, all guided", "trace_all", {}),
    ("KV MXFP4, qat", "qat", {"precision.kv": "mxfp4"}),
    ("KV FP8, qat", "qat", {"precision.kv": "fp8"}),
]


def get_config():
    return study("configs/study_50m.py", ROWS, overrides=OVERRIDES, name="long")
