"""config.json of the Hub to ModelConfig and back, by the tables of family_table.py.

A field of config.json that is neither mapped, nor harmless, nor at its only supported
value is an error.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from trace_jax.model.config import ModelConfig
from trace_jax.model.config_parts import Llama3Rope, Yarn
from trace_jax.model.family_table import ALIASES, FAMILIES, HARMLESS, ONLY, SHARED, family_of, flat

# Fields that a config.json may leave out, or have as null.
OPTIONAL = ("clip_qkv", "norm_eps", "norm_topk", "latent.q_rank")
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_positions",
}


# --- from config.json --------------------------------------------------------------------


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
    left = {k: v for k, v in hub.items() if k not in HARMLESS and k not in family.unused}
    fields, only = _fields(family), ONLY | dict(family.only)
    for key in [k for k in left if k in only]:
        if left[key] not in only[key]:
            _unsupported(key, left[key])
    values = dict(family.features)
    for key, field in fields.items():
        key = ALIASES[key] if key not in left and key in ALIASES else key
        if (value := left.pop(key, None)) is not None:
            values[field] = value
    values |= _rope(left, name)
    if name in DERIVE:
        values |= DERIVE[name](left, values)
    for key, value in left.items():
        if key not in only:
            _unsupported(key, value)
    heads = values.get("num_heads", 1)
    values.setdefault("num_kv_heads", heads)
    values.setdefault("head_dim", values.get("hidden", 0) // heads)
    values.setdefault("tie_embeddings", False)
    for key, field in fields.items():
        if field not in values and field not in OPTIONAL:
            raise ValueError(f"config.json: {key} is missing")
    if "norm_topk_prob" in fields:
        values.setdefault("norm_topk", False)
    return _built(values | {"dtype": dtype})


def _fields(family) -> dict[str, str]:
    fields = SHARED | dict(family.fields)
    return {key: field for key, field in fields.items() if key not in family.unused}


def _unsupported(key, value):
    raise ValueError(f"config.json: {key} = {value!r} is not supported")


def _built(values: dict[str, Any]) -> ModelConfig:
    """ModelConfig of {field: value} with dotted names of parts' fields."""
    parts, plain = {}, {}
    for key, value in values.items():
        part, _, field = key.rpartition(".")
        (parts.setdefault(part, {}) if part else plain)[field] = value
    defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    built = {part: dataclasses.replace(defaults[part], **given) for part, given in parts.items()}
    return ModelConfig(**plain, **built)


def _rope(left: dict, name: str) -> dict[str, Any]:
    """rope_theta and its scaling, from transformers 4's or 5's fields, which leave `left`."""
    scaling = dict(left.pop("rope_parameters", None) or left.pop("rope_scaling", None) or {})
    left.pop("rope_scaling", None)
    theta = float(scaling.pop("rope_theta", None) or left.pop("rope_theta", None) or 10_000.0)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    values = {"rope_theta": theta}
    if "rotary_fraction" in FAMILIES[name].derived:
        fraction = left.pop("partial_rotary_factor", None)
        values["rotary_fraction"] = scaling.pop("partial_rotary_factor", None) or fraction or 0.25
        # Text has one position where images have three.
        scaling = {k: v for k, v in scaling.items() if not k.startswith("mrope_")}
    if kind == "default" and not scaling:
        return values
    if kind not in ("yarn", "llama3"):
        _unsupported("rope_scaling.rope_type", kind)
    names = YARN if kind == "yarn" else LLAMA3
    for key, value in scaling.items():
        if key not in names:
            _unsupported(f"rope_scaling.{key}", value)
        if value is not None:
            values[f"{kind}.{names[key]}"] = value
    return values


def _gpt_oss(left: dict, values: dict) -> dict[str, Any]:
    window, layers = left.pop("sliding_window", None) or 0, values.get("num_layers", 0)
    kinds = left.pop("layer_types", None) or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
    ]
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            _unsupported("layer_types", kind)
    return {"windows": tuple(window if kind == "sliding_attention" else 0 for kind in kinds)}


def _mixtral(left: dict, values: dict) -> dict[str, Any]:
    window = left.pop("sliding_window", None)
    return {"windows": (window,) * values.get("num_layers", 0) if window else ()}


def _deepseek(left: dict, values: dict) -> dict[str, Any]:
    """Groups of experts, shared experts, and the width of a query head."""
    method = left.pop("topk_method", "noaux_tc" if values["router.correction"] else None)
    groups, top_groups = left.pop("n_group", None) or 1, left.pop("topk_group", None) or 1
    if method == "greedy":
        groups = top_groups = 1
    elif method not in ("group_limited_greedy", "noaux_tc"):
        _unsupported("topk_method", method)
    shared = (left.pop("n_shared_experts", None) or 0) * values.get("expert_dim", 0)
    head_dim = values.get("latent.nope_dim", 0) + values.get("latent.rope_dim", 0)
    return {
        "router.groups": groups,
        "router.top_groups": top_groups,
        "shared_dim": shared,
        "head_dim": head_dim,
    }


def _qwen3_5(left: dict, values: dict) -> dict[str, Any]:
    layers = values.get("num_layers", 0)
    every = left.pop("full_attention_interval", None)
    kinds = left.pop("layer_types", None)
    if kinds:
        every = kinds.index("full_attention") + 1 if "full_attention" in kinds else layers + 1
        if kinds != _interval(layers, every):
            _unsupported("layer_types", kinds)
    if not every:
        raise ValueError("config.json: layer_types is missing")
    return {"full_attention_every": every}


def _interval(layers: int, every: int) -> list[str]:
    kinds = ("linear_attention", "full_attention")
    return [kinds[(i + 1) % every == 0] for i in range(layers)]


DERIVE = {
    "gpt_oss": _gpt_oss,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "qwen3_5_moe_text": _qwen3_5,
}


# --- to config.json ----------------------------------------------------------------------


def config_to_hub(config: ModelConfig) -> dict[str, Any]:
    """config.json of `config`, without token ids (they are the tokenizer's)."""
    name = family_of(config)
    family, found = FAMILIES[name], flat(config)
    hub = {"architectures": [family.architecture], "model_type": name}
    hub |= {k: v[0] for k, v in ({"hidden_act": ("silu",)} | dict(family.only)).items()}
    for key, field in _fields(family).items():
        nothing = field in ("clip_qkv", "latent.q_rank") and not found[field]
        hub[key] = None if nothing else found[field]
    if name == "qwen3_moe":
        hub["intermediate_size"] = config.expert_dim  # of dense layers, which there are none
    hub |= _rope_to_hub(config)
    if name in EXPRESS:
        hub |= EXPRESS[name](config)
    hub["torch_dtype"] = "bfloat16"
    return hub


def _rope_to_hub(config: ModelConfig) -> dict[str, Any]:
    hub = {"rope_theta": config.rope_theta}
    if config.llama3 != Llama3Rope():
        given = {key: getattr(config.llama3, field) for key, field in LLAMA3.items()}
        hub["rope_scaling"] = {"rope_type": "llama3"} | given
    if config.yarn != Yarn():
        given = {key: getattr(config.yarn, field) for key, field in YARN.items()}
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if not given[key]:
                del given[key]
        hub["rope_scaling"] = {"rope_type": "yarn"} | given
    return hub


def _windows_to_hub(config: ModelConfig) -> dict[str, Any]:
    kinds = ("full_attention", "sliding_attention")
    if not config.windows:
        return {}
    return {
        "sliding_window": max(config.windows),
        "layer_types": [kinds[w > 0] for w in config.windows],
    }


def _deepseek_to_hub(config: ModelConfig) -> dict[str, Any]:
    grouped = config.router.groups > 1
    v2 = {"topk_method": "group_limited_greedy" if grouped else "greedy"}
    return {
        "n_group": config.router.groups,
        "topk_group": config.router.top_groups,
        "n_shared_experts": config.shared_dim // config.expert_dim,
    } | ({"num_nextn_predict_layers": 0} if config.router.correction else v2)


def _qwen3_5_to_hub(config: ModelConfig) -> dict[str, Any]:
    return {
        "layer_types": _interval(config.num_layers, config.full_attention_every),
        "partial_rotary_factor": config.rotary_fraction,
    }


EXPRESS = {
    "gpt_oss": _windows_to_hub,
    "mixtral": lambda config: {"sliding_window": max(config.windows, default=None)},
    "deepseek_v2": _deepseek_to_hub,
    "deepseek_v3": _deepseek_to_hub,
    "qwen3_5_moe_text": _qwen3_5_to_hub,
}
