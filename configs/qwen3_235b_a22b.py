"""Qwen3-235B-A22B: 235 B parameters, 22 B active; the shape of the Hub's checkpoint.

    python -m experiments.plan --config=configs/qwen3_235b_a22b.py --topology=v5p:4x8x8

Weights: 438 GiB in BF16. FP32 masters with Adam moments take 2.6 TiB more: a slice of a pod.
Not run here: counts are tested by shapes, and the plan says what is compiled.
"""

from trace_jax.config import default


def get_config():
    config = default(
        vocab_size=151_936,
        num_layers=94,
        hidden=4096,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        num_experts=128,
        top_k=8,
        expert_dim=1536,
        tie_embeddings=False,
        rope_theta=1_000_000.0,
        max_positions=40_960,
    )
    config.rl.remat = "full"
    config.rl.samples = 4
    config.rl.prompts_per_step = 256
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.mesh.expert = 8
    return config
