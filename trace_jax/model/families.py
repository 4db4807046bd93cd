"""Checkpoint families: how the Hub's config.json and tensor names map to this model.

A family is data: the features that it fixes, the names of its fields and of its
tensors. The layers are those of model/ for all of them. A field of config.json that
is neither mapped, nor harmless, nor at its only supported value is an error.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from trace_jax.model.config import ModelConfig, Yarn


class MlpNames(NamedTuple):
    """Hub names of a layer's feed-forward half, below `block`."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclasses.dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
      architecture: transformers' class.
      features: ModelConfig fields that it fixes (all others keep their default).
      fields: {config.json key: ModelConfig field} beyond the shared ones.
      only: {config.json key: supported values}; other values are an error.
      unused: keys of its config.json that change nothing here.
      mlp: tensor names of the feed-forward half.
      fused: experts are stacked in one tensor, gate and up columns interleaved (GPT-OSS).
    """

    architecture: str
    features: Mapping[str, Any]
    fields: Mapping[str, str]
    only: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()
    mlp: MlpNames = MlpNames()
    fused: bool = False


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
    "_name_or_path architectures attention_dropout bos_token_id dtype eos_token_id "
    "initializer_range is_llama_config model_type output_router_logits pad_token_id "
    "quantization_config router_aux_loss_coef router_jitter_noise torch_dtype "
    "transformers.js_config transformers_version use_cache"
).split()
MOE_FIELDS = {"num_experts": "num_experts", "num_experts_per_tok": "top_k"}
DENSE = {"num_experts": 0, "top_k": 0}
NO_BIAS = {"attention_bias": (False,)}
NO_WINDOW = {"sliding_window": (None,), "use_sliding_window": (False,)}

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
        NO_WINDOW,
        mlp=MlpNames("block_sparse_moe", "gate", "w1", "w3", "w2"),
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
    ),
}
ALIASES = {"num_local_experts": "num_experts", "num_experts": "num_local_experts"}


def family_of(config: ModelConfig) -> str:
    """The family whose fixed features are those of `config`.

    Raises:
      ValueError: no family has this combination of features.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    for name, family in FAMILIES.items():
        mapped = {*SHARED.values(), *family.fields.values(), "rope_theta", "yarn", "dtype"}
        if family.features.get("sinks"):
            mapped.add("windows")
        wanted = {k: v for k, v in defaults.items() if k not in mapped} | dict(family.features)
        dense_or_moe = (config.num_experts == 0) == ("num_experts" in family.features)
        if dense_or_moe and all(getattr(config, k) == v for k, v in wanted.items()):
            return name
    raise ValueError(f"no checkpoint family has the features of this model: {config}")


# --- config.json ---------------------------------------------------------------------


def config_from_hub(hub: Mapping[str, Any], dtype: str = "bfloat16") -> ModelConfig:
    """ModelConfig of a parsed config.json.

    Raises:
      ValueError: unknown model_type; a missing, unknown or unsupported field, named.
    """
    name = hub.get("model_type")
    if name not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {name!r} is not supported; known: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    fields = SHARED | dict(family.fields)
    only = ONLY | dict(family.only)
    left = {k: v for k, v in hub.items() if k not in HARMLESS and k not in family.unused}
    values = dict(family.features)
    for key, field in fields.items():
        key = ALIASES[key] if key not in left and key in ALIASES else key
        if key in left:
            value = left.pop(key)
            if value is not None:
                values[field] = value
    for key in [k for k in left if k in only]:
        if (value := left.pop(key)) not in only[key]:
            _unsupported(key, value)
    values["rope_theta"], values["yarn"] = _rope(left)
    if name == "gpt_oss":
        values["windows"] = _windows(left, values)
    for key, value in left.items():
        _unsupported(key, value)
    heads = values.get("num_heads", 1)
    values.setdefault("num_kv_heads", heads)
    values.setdefault("head_dim", values.get("hidden", 0) // heads)
    values.setdefault("tie_embeddings", False)
    for key, field in fields.items():
        if field not in values and field not in ("clip_qkv", "norm_eps", "norm_topk"):
            raise ValueError(f"config.json: {key} is missing")
    if "norm_topk_prob" in fields:
        values.setdefault("norm_topk", False)
    return ModelConfig(**values, dtype=dtype)


def _unsupported(key, value):
    raise ValueError(f"config.json: {key} = {value!r} is not supported")


def _rope(left: dict) -> tuple[float, Yarn]:
    """rope_theta and Yarn, from transformers 4's or 5's fields, which leave `left`."""
    scaling = dict(left.pop("rope_parameters", None) or left.pop("rope_scaling", None) or {})
    left.pop("rope_scaling", None)
    theta = float(scaling.pop("rope_theta", None) or left.pop("rope_theta", None) or 10_000.0)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind == "default" and not scaling:
        return theta, Yarn()
    if kind != "yarn":
        _unsupported("rope_scaling.rope_type", kind)
    names = {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    }
    for key, value in scaling.items():
        if key not in names:
            _unsupported(f"rope_scaling.{key}", value)
    return theta, Yarn(**{names[k]: v for k, v in scaling.items() if v is not None})


def _windows(left: dict, values: dict) -> tuple[int, ...]:
    window = left.pop("sliding_window", None) or 0
    layers = values.get("num_layers", 0)
    kinds = left.pop("layer_types", None) or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
    ]
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            _unsupported("layer_types", kind)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def config_to_hub(config: ModelConfig) -> dict[str, Any]:
    """config.json of `config`, without token ids (they are the tokenizer's)."""
    name = family_of(config)
    family = FAMILIES[name]
    fields = SHARED | dict(family.fields)
    hub = {"architectures": [family.architecture], "model_type": name}
    hub |= {key: getattr(config, field) for key, field in fields.items()}
    if "clip_qkv" in hub:
        hub["clip_qkv"] = hub["clip_qkv"] or None
    hub |= {k: v[0] for k, v in ({"hidden_act": ("silu",)} | dict(family.only)).items()}
    if name == "qwen3_moe":
        hub["intermediate_size"] = config.expert_dim  # of dense layers, which there are none
    hub["rope_theta"] = config.rope_theta
    if config.yarn != Yarn():
        yarn = config.yarn
        hub["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "truncate": yarn.truncate,
        }
        if yarn.attention_factor:
            hub["rope_scaling"]["attention_factor"] = yarn.attention_factor
    if config.windows:
        hub["sliding_window"] = max(config.windows)
        kinds = ("full_attention", "sliding_attention")
        hub["layer_types"] = [kinds[w > 0] for w in config.windows]
    hub["torch_dtype"] = "bfloat16"
    return hub
