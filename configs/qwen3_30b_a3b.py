"""Qwen3-30B-A3B: 30.5 B parameters, 3.3 B active; the shape of the Hub's checkpoint.

    python -m experiments.train --config=configs/qwen3_30b_a3b.py --workdir=runs/qwen3

Weights: 57 GiB in BF16, 18 GiB with NVFP4 experts. FP32 masters with Adam moments take
342 GiB more, so a run needs a mesh of eight 80 GB devices or four of 141 GB with the
learner sharded over them. Not run here: counts and bytes are tested by shapes alone.
"""

from trace_jax.config import default


def get_config():
    config = default(
        vocab_size=151_936,
        num_layers=48,
        hidden=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        num_experts=128,
        top_k=8,
        expert_dim=768,
        tie_embeddings=False,
        rope_theta=1_000_000.0,
        max_positions=40_960,
    )
    config.mesh.fsdp = -1
    config.mesh.data = 1
    return config
