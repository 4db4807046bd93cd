"""Qwen3.5-35B-A3B: 34.7 B parameters, 3.5 B active; the language model of that checkpoint.

    python -m experiments.train --config=configs/qwen3_5_35b_a3b.py --workdir=runs/qwen3_5

Three of four layers have linear attention: only ten layers have keys and values to cache,
to quantize and to guide; the others' states take 61 MiB a sequence, however long. Weights:
65 GiB in BF16, 21 GiB with NVFP4 experts. FP32 masters with Adam moments take 387 GiB more,
so a run needs a mesh of eight 80 GB devices or four of 141 GB with the learner sharded over
them. Not run here: counts and bytes are tested by shapes alone.
"""

from trace_jax.config import default
from trace_jax.model.config_parts import DeltaNet


def get_config():
    config = default(
        vocab_size=248_320,
        num_layers=40,
        hidden=2048,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        num_experts=256,
        top_k=8,
        expert_dim=512,
        shared_dim=512,
        shared_gate=True,
        tie_embeddings=False,
        rope_theta=10_000_000.0,
        rotary_fraction=0.25,
        attention_gate=True,
        zero_centred_norms=True,
        full_attention_every=4,
        delta=DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        max_positions=262_144,
    )
    config.mesh.fsdp = -1
    config.mesh.data = 1
    return config
