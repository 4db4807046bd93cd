"""A small MoE learns to sort numbers by GRPO with NVFP4 rollouts and TRACE guidance.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/sorting

Two CPU cores, about 3 minutes and 2 GiB; held-out accuracy rises clearly
(the README shows a run).
"""

from trace_jax.config import default
from trace_jax.tasks import ByteTokenizer


def get_config():
    config = default(
        vocab_size=ByteTokenizer.vocab_size,
        num_layers=4,
        hidden=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_experts=8,
        top_k=2,
        expert_dim=64,
    )
    config.task.datasets = (
        (
            "number_sorting",
            1.0,
            (
                ("min_numbers", 2),
                ("max_numbers", 3),
                ("min_decimals", 0),
                ("max_decimals", 0),
                ("min_value", 0),
                ("max_value", 99),
            ),
        ),
    )
    config.task.max_prompt = 24
    config.task.max_response = 10
    config.warmup.steps = 200
    config.warmup.batch_size = 128
    config.warmup.learning_rate = 3e-3
    config.rl.steps = 100
    config.rl.prompts_per_step = 32
    config.rl.samples = 8
    config.rl.balance_coef = 0.01
    config.optim.learning_rate = 3e-4
    config.optim.warmup_steps = 5
    config.optim.b2 = 0.99
    config.eval.problems = 256
    return config
