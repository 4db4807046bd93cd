"""A shape of 2.4 T parameters, 95 B active: no published model, only the size of one.

    python -m experiments.plan --config=configs/shape_2400b_a95b.py --topology=tpu7x:8x8x16 \
        --mesh=data=1,fsdp=32,expert=64 --batch=4096 --length=256 --programs=none

Sparse as today's largest (17 of 512 experts, a number that pods divide), with grouped queries. FP32
masters with Adam moments alone take 26 TiB. Not run here.
"""

from trace_jax.config import default


def get_config():
    config = default(
        vocab_size=160_000,
        num_layers=62,
        hidden=8192,
        num_heads=88,
        num_kv_heads=8,
        head_dim=128,
        num_experts=512,
        top_k=17,
        expert_dim=3072,
        tie_embeddings=False,
        rope_theta=1_000_000.0,
        max_positions=131_072,
    )
    config.rl.remat = "full"
    config.rl.samples = 2
    config.rl.prompts_per_step = 1024
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.mesh.expert = 32
    return config
