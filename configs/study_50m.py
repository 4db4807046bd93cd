"""The studies' model: a MoE of 53 M parameters on words and numbers, warm-started by a bad teacher.

    python -m experiments.sweep --config=experiments/methods/sweep.py --jobs=2

or one run: python -m experiments.train --config=configs/study_50m.py --workdir=runs/study

Not run yet. Sized for an H200: 8 layers, 32 experts of which 4 are used (8.4 M parameters
a token), 512 responses of up to 26 tokens a step; estimated at 0.6 to 0.9 s a step, so
60 to 90 s for the 100 steps. Seven in ten of the teacher's answers are reversed, so a warm
start that has learnt all there is to learn answers about 0.3 rightly, in either of two ways.
"""

from trace_jax.config import default
from trace_jax.tasks import ByteTokenizer


def get_config():
    config = default(
        vocab_size=ByteTokenizer.vocab_size,
        num_layers=8,
        hidden=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        num_experts=32,
        top_k=4,
        expert_dim=256,
    )
    numbers = (("min_numbers", 4), ("max_numbers", 6), ("min_value", 0), ("max_value", 99))
    words = (("min_words", 3), ("max_words", 4), ("min_word_length", 3), ("max_word_length", 5))
    config.task.datasets = (
        ("spell_backward", 1.0, (("min_word_len", 3), ("max_word_len", 10))),
        ("word_sorting", 1.0, words),
        ("number_sorting", 1.0, (*numbers, ("min_decimals", 0), ("max_decimals", 0))),
    )
    config.task.max_prompt = 38
    config.task.max_response = 26
    config.warmup.steps = 600
    config.warmup.batch_size = 256
    config.warmup.learning_rate = 1e-3
    config.warmup.wrong_answers = 0.7
    config.rl.steps = 100
    config.rl.prompts_per_step = 64
    config.rl.samples = 8
    config.rl.balance_coef = 0.01
    config.optim.learning_rate = 3e-4
    config.optim.warmup_steps = 5
    config.optim.b2 = 0.99
    config.eval.problems = 512
    config.checkpoint.every = 50
    config.checkpoint.keep = 1
    return config
