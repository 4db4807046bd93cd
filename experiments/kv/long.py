"""The cache's formats where answers are eight times as long: 96 random digits, copied. See README.

    python -m experiments.kv.long          # writes digits.jsonl again
"""

import json
import random
from pathlib import Path

from experiments.studies import study

DIGITS = "experiments/kv/digits.jsonl"
OVERRIDES = (
    ("task.kind", "jsonl"),
    ("task.params", (("path", DIGITS),)),
    ("task.max_prompt", 104),
    ("task.max_response", 97),
    ("warmup.steps", 600),
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


def problems() -> str:
    """1,200 rows of digits to copy, the same every time."""
    draw = random.Random(0)
    digits = ("".join(draw.choices("0123456789", k=96)) for _ in range(1200))
    return "".join(json.dumps({"prompt": f"copy {d} =", "answer": d}) + "\n" for d in digits)


if __name__ == "__main__":
    Path(DIGITS).write_text(problems())
