"""Qwen3.5-35B-A3B: byte accounting of its sites; the model itself cannot be run yet.

Every fourth layer has full attention and a KV-cache, the others linear attention, so
`full_attention_every=4` divides KV bytes and the K and V guidance by four. Its gated
delta-rule layers, gated attention and shared expert are not built here: parameter counts
from these shapes would be wrong and are not given.

    python -c "from configs.qwen35_35b_a3b import get_config; print(get_config().model)"
"""

from trace_jax.config import default


def get_config():
    return default(
        vocab_size=248_320,
        num_layers=40,
        hidden=2048,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        num_experts=256,
        top_k=8,
        expert_dim=512,
        tie_embeddings=False,
        rope_theta=10_000_000.0,
        full_attention_every=4,
        max_positions=262_144,
    )
