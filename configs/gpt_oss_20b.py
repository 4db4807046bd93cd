"""GPT-OSS-20B: 20.9 B parameters, 3.6 B active (4.2 B with the embedding), as on the Hub.

    python -m experiments.train --config=configs/gpt_oss_20b.py --workdir=runs/gpt_oss

Weights: 39 GiB in BF16, 13 GiB with MXFP4 experts, which is the Hub's own format. FP32
masters with Adam moments take 234 GiB more: eight 80 GB devices, or two of 141 GB and the
learner sharded over four. Not run here: counts and bytes are tested by shapes alone.
"""

from trace_jax.config import default
from trace_jax.model.config import Yarn


def get_config():
    config = default(
        vocab_size=201_088,
        num_layers=24,
        hidden=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        num_experts=32,
        top_k=4,
        expert_dim=2880,
        qk_norm=False,
        attention_bias=True,
        moe_bias=True,
        sinks=True,
        swiglu_limit=7.0,
        windows=(128, 0) * 12,
        tie_embeddings=False,
        rope_theta=150_000.0,
        norm_eps=1e-5,
        max_positions=131_072,
        yarn=Yarn(factor=32.0, original_positions=4096, truncate=False),
    )
    config.precision.weights = "mxfp4"
    config.precision.activations = "mxfp4"
    config.precision.kv = "mxfp4"
    config.mesh.fsdp = -1
    config.mesh.data = 1
    return config
