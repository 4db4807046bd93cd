"""Checkpoint families: how the Hub's config.json and tensor names map to this model.

A family is data: the features that it fixes, the names of its fields and of its
tensors. The layers are those of model/ for all of them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from trace_jax.model.config import ModelConfig


class MlpNames(NamedTuple):
    """Hub names of a layer's feed-forward half, below `block`."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
      architecture: transformers' class.
      features: ModelConfig fields that it fixes (all others keep their default).
      fields: {config.json key: ModelConfig field} beyond the shared ones; a dot leads into
        a part of the configuration.
      only: {config.json key: supported values}; other values are an error.
      unused: keys of its config.json that change nothing here.
      mlp: tensor names of the feed-forward half.
      fused: experts are stacked in one tensor, gate and up columns interleaved (GPT-OSS).
      derived: ModelConfig fields that families.py works out of several keys.
      left_out: start of the names of tensors that are no part of this model, such as
        multi-token-prediction layers; imports skip them, exports lack them.
    """

    architecture: str
    features: Mapping[str, Any]
    fields: Mapping[str, str]
    only: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()
    mlp: MlpNames = MlpNames()
    fused: bool = False
    derived: tuple[str, ...] = ()
    left_out: str = ""


SHARED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "max_position_embeddings": "max_positions",
}
ONLY = {"hidden_act": ("silu",), "pretraining_tp": (1,), "rope_interleaved": (False,)}
# Training-time and bookkeeping fields: no forward of ours depends on them.
HARMLESS = (
    "_name_or_path architectures attention_dropout auto_map bos_token_id dtype eos_token_id "
    "initializer_range is_llama_config model_type output_router_logits pad_token_id "
    "quantization_config router_aux_loss_coef router_jitter_noise torch_dtype "
    "transformers.js_config transformers_version use_cache"
).split()
MOE_FIELDS = {"num_experts": "num_experts", "num_experts_per_tok": "top_k"}
DENSE = {"num_experts": 0, "top_k": 0}
NO_BIAS = {"attention_bias": (False,)}
DEEPSEEK_FIELDS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_dim",
    "intermediate_size": "dense_dim",
    "first_k_dense_replace": "dense_layers",
    "norm_topk_prob": "norm_topk",
    "routed_scaling_factor": "router.scale",
    "kv_lora_rank": "latent.kv_rank",
    "q_lora_rank": "latent.q_rank",
    "qk_nope_head_dim": "latent.nope_dim",
    "qk_rope_head_dim": "latent.rope_dim",
    "v_head_dim": "latent.v_dim",
}
DEEPSEEK_UNUSED = ("head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size")
DEEPSEEK_DERIVED = ("head_dim", "router.groups", "router.top_groups", "shared_dim")

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        {"qk_norm": False, **DENSE},
        {"intermediate_size": "expert_dim"},
        {**NO_BIAS, "mlp_bias": (False,)},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": True, "qk_norm_over": "head", **DENSE},
        {"intermediate_size": "expert_dim"},
        {**NO_BIAS, "use_sliding_window": (False,)},
        ("sliding_window", "max_window_layers", "layer_types"),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True, "qk_norm_over": "head"},
        {**MOE_FIELDS, "moe_intermediate_size": "expert_dim", "norm_topk_prob": "norm_topk"},
        {
            **NO_BIAS,
            "use_sliding_window": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": (None, []),
        },
        ("sliding_window", "max_window_layers", "intermediate_size", "layer_types"),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {"qk_norm": True, "qk_norm_over": "projection"},
        {
            **MOE_FIELDS,
            "intermediate_size": "expert_dim",
            "norm_topk_prob": "norm_topk",
            "clip_qkv": "clip_qkv",
        },
        NO_BIAS,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"qk_norm": False, "norm_topk": True},
        {
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "top_k",
            "intermediate_size": "expert_dim",
        },
        mlp=MlpNames("block_sparse_moe", "gate", "w1", "w3", "w2"),
        derived=("windows",),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "qk_norm": False,
            "norm_topk": True,
            "attention_bias": True,
            "moe_bias": True,
            "sinks": True,
        },
        {
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "top_k",
            "intermediate_size": "expert_dim",
            "swiglu_limit": "swiglu_limit",
        },
        {"attention_bias": (True,), "swiglu_alpha": (1.702,)},
        ("initial_context_length", "experts_per_token"),
        mlp=MlpNames(router="router"),
        fused=True,
        derived=("windows",),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {"qk_norm": False, "router.scores": "softmax", "router.correction": False},
        DEEPSEEK_FIELDS,
        {
            **NO_BIAS,
            "mlp_bias": (False,),
            "moe_layer_freq": (1,),
            "scoring_func": ("softmax",),
            # The published code scales gates that are not normalized, and no others.
            "norm_topk_prob": (False,),
        },
        DEEPSEEK_UNUSED,
        mlp=MlpNames(shared="shared_experts"),
        derived=DEEPSEEK_DERIVED,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
            "qk_norm": False,
            "router.scores": "sigmoid",
            "router.correction": True,
            "router.group_best": 2,
        },
        DEEPSEEK_FIELDS,
        {
            **NO_BIAS,
            "moe_layer_freq": (1,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "rope_interleave": (True,),
        },
        (*DEEPSEEK_UNUSED, "num_nextn_predict_layers"),
        mlp=MlpNames(shared="shared_experts"),
        derived=DEEPSEEK_DERIVED,
        left_out="model.layers.{num_layers}.",
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        {
            "qk_norm": True,
            "qk_norm_over": "head",
            "norm_topk": True,
            "attention_gate": True,
            "zero_centred_norms": True,
            "shared_gate": True,
        },
        {
            **MOE_FIELDS,
            "moe_intermediate_size": "expert_dim",
            "shared_expert_intermediate_size": "shared_dim",
            "linear_num_key_heads": "delta.key_heads",
            "linear_num_value_heads": "delta.value_heads",
            "linear_key_head_dim": "delta.key_dim",
            "linear_value_head_dim": "delta.value_dim",
            "linear_conv_kernel_dim": "delta.conv_width",
        },
        {
            **NO_BIAS,
            "attn_output_gate": (True,),
            "mlp_only_layers": (None, []),
            "mamba_ssm_dtype": ("float32",),
        },
        ("intermediate_size", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        mlp=MlpNames(shared="shared_expert"),
        derived=("full_attention_every", "rotary_fraction"),
        left_out="mtp.",
    ),
}
REQUIRED = [
    f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING
]
ALIASES = {"num_local_experts": "num_experts", "num_experts": "num_local_experts"}


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """{field: value} of a configuration; those of its parts have dotted names."""
    out = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out |= flat(value, f"{prefix}{field.name}.")
        else:
            out[prefix + field.name] = value
    return out


def family_of(config: ModelConfig) -> str:
    """The family whose fixed features are those of `config`.

    Raises:
      ValueError: no family has this combination of features.
    """
    found = flat(config)
    neutral = flat(ModelConfig(**dict.fromkeys(REQUIRED, 2)))
    for name, family in FAMILIES.items():
        mapped = {*SHARED.values(), *family.fields.values(), *family.derived, "rope_theta", "dtype"}
        wanted = {k: v for k, v in neutral.items() if k not in mapped and k not in REQUIRED}
        wanted = {k: v for k, v in wanted.items() if not k.startswith(("yarn.", "llama3."))}
        wanted |= {k: v for k, v in family.features.items()}
        # What a family maps, its models have: no Llama is a DeepSeek without latents.
        parts = {"latent.kv_rank", "delta.key_heads"} & set(family.fields.values())
        dense_or_moe = (config.num_experts == 0) == ("num_experts" in family.features)
        if dense_or_moe and all(found[k] == v for k, v in wanted.items()):
            if all(found[k] for k in parts):
                return name
    raise ValueError(f"no checkpoint family has the features of this model: {config}")
