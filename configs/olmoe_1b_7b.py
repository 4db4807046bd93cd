"""OLMoE-1B-7B (0924): 6.9 B parameters, 1.3 B active; the shape of the Hub's checkpoint.

    python -m experiments.train --config=configs/olmoe_1b_7b.py --workdir=runs/olmoe

Weights: 13 GiB in BF16, 4.3 GiB with NVFP4 experts. FP32 masters with Adam moments take
77 GiB more: one device of 141 GB, or four of 40 GB. Not run here: counts and bytes are
tested by shapes alone.
"""

from trace_jax.config import default


def get_config():
    config = default(
        vocab_size=50_304,
        num_layers=16,
        hidden=2048,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        num_experts=64,
        top_k=8,
        expert_dim=1024,
        norm_topk=False,
        qk_norm_over="projection",
        tie_embeddings=False,
        norm_eps=1e-5,
        max_positions=4096,
    )
    config.mesh.fsdp = -1
    config.mesh.data = 1
    return config
