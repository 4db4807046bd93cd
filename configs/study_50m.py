"""The studies' model: a MoE of 52 M parameters that spells words backward, taught by a bad teacher.

    python -m experiments.sweep --config=experiments/methods/sweep.py --jobs=8

or one run: python -m experiments.train --config=configs/study_50m.py --workdir=runs/study

Sized for many runs on one H200: 8 layers, 32 experts of which 4 are used (8.0 M parameters a
token), 256 responses of up to 12 tokens a step. Measured there with eleven processes on the card:
28 s for the warm start, 10 to 28 s for a run of 40 steps once its programs are compiled, and about
a minute to compile them.

Seven in ten of the teacher's answers are the word itself, unreversed, so a warm start that has
learnt all there is to learn answers about 0.3 rightly, in either of two ways. Runs leave no
checkpoints: one is 640 MB.
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
    config.task.datasets = (("spell_backward", 1.0, (("min_word_len", 3), ("max_word_len", 10))),)
    config.task.max_prompt = 24
    config.task.max_response = 12
    config.warmup.steps = 300
    config.warmup.batch_size = 128
    config.warmup.learning_rate = 1e-3
    config.warmup.wrong_answers = 0.7
    config.rl.steps = 40
    config.rl.prompts_per_step = 32
    config.rl.samples = 8
    config.rl.balance_coef = 0.01
    config.optim.learning_rate = 2e-4
    config.optim.warmup_steps = 5
    config.optim.b2 = 0.99
    config.eval.problems = 512
    config.eval.samples = 2
    config.checkpoint.every = 0
    config.checkpoint.keep = 1
    return config
