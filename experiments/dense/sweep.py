"""Is a dense model any different? See README.md."""

from experiments.studies import SMALL, SMALLER, study

OVERRIDES = (
    *SMALLER,
    ("rollout.engine_noise", 0.01),
    ("model.num_experts", 0),
    ("model.top_k", 0),
    ("model.expert_dim", 128),
)
ROWS = [(m, m, {}) for m in ("bf16", "naive", "qat", "trace", "trace_all")]


def get_config():
    return study(SMALL, ROWS, seeds=3, overrides=OVERRIDES)
