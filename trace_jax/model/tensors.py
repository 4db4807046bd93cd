"""The tensors of a checkpoint: Hub name, shape, and where each lies in the parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from trace_jax.model.config import LayerKind, ModelConfig
from trace_jax.model.families import FAMILIES, family_of
from trace_jax.model.specs import depth, stacks_of
from trace_jax.model.transformer import init


class Layout(NamedTuple):
    """How a tensor's axes differ from ours: array functions there and back."""

    to_ours: Callable[[np.ndarray], np.ndarray]
    to_hub: Callable[[np.ndarray], np.ndarray]


def _deinterleave(a):
    """Rows (axis 1) g0, u0, g1, u1, ... to all gates, then all ups."""
    return np.concatenate([a[:, 0::2], a[:, 1::2]], axis=1)


def _interleave(a):
    half = a.shape[1] // 2
    return np.stack([a[:, :half], a[:, half:]], axis=2).reshape(a.shape)


def _swap(a):
    return np.swapaxes(a, -1, -2)


PLAIN = Layout(lambda a: a, lambda a: a)
TRANSPOSED = Layout(_swap, _swap)
INTERLEAVED = Layout(_deinterleave, _interleave)
INTERLEAVED_TRANSPOSED = Layout(lambda a: _deinterleave(_swap(a)), lambda a: _swap(_interleave(a)))
CONVOLUTION = Layout(lambda a: a[:, 0], lambda a: a[:, None])


def rotary_pairs(heads: int, before: int, rope: int) -> Layout:
    """Rows of heads whose last `rope` rows are rotary pairs (0, 1), (2, 3), ... in the file.

    Ours are half-split, pairs (i, i + half): one permutation in, its inverse out.
    """
    rows = np.arange(heads * (before + rope)).reshape(heads, -1)
    turned = np.concatenate([rows[:, before::2], rows[:, before + 1 :: 2]], axis=1)
    order = np.concatenate([rows[:, :before], turned], axis=1).reshape(-1)
    inverse = np.argsort(order)
    return Layout(lambda a: a[order], lambda a: a[inverse])


class Tensor(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
      name, shape: as in the file.
      path: keys of the parameter that holds it; a number names one of several stacks.
      index: where in that parameter: stacked layer[, expert[, slice of rows]].
      layout: of the file's axes.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str | int, ...]
    index: tuple = ()
    layout: Layout = PLAIN


def param_shapes(config: ModelConfig) -> dict:
    """Parameter tree as ShapeDtypeStructs; allocates nothing."""
    return jax.eval_shape(partial(init, config), jax.random.key(0))


def parameter_count(config: ModelConfig, active: bool = False) -> int:
    """Parameters in total, or all but the experts that a token is not sent to (active)."""
    shapes = param_shapes(config)
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    if not active or not config.num_experts:
        return total
    names = ("gate_up", "down", "gate_up_bias")
    stacks = [stack["moe"] for stack in stacks_of(shapes["layers"]) if "moe" in stack]
    experts = sum(moe[name].size for moe in stacks for name in names if name in moe)
    return total - experts * (config.num_experts - config.top_k) // config.num_experts


def leaf_at(tree: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        tree = tree[key] if isinstance(tree, dict | tuple) else getattr(tree, key)
    return tree


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of `config`'s family, in the Hub's BF16 layout."""
    family = FAMILIES[family_of(config)]
    shapes = param_shapes(config)
    found = [
        ("model.embed_tokens.weight", ("embed",)),
        ("model.norm.weight", ("final_norm", "weight")),
    ]
    if not config.tie_embeddings:
        found.append(("lm_head.weight", ("unembed",)))
    out = [Tensor(name, leaf_at(shapes, path).shape, path) for name, path in found]
    for layer, kind in enumerate(config.layer_kinds):
        prefix = f"model.layers.{layer}."
        path, index = _place(shapes["layers"], layer)
        for part in _parts(config, family, kind):
            found = (*path, *part.path)
            shape = part.layout.to_hub(np.empty(leaf_at(shapes, found).shape[1:], bool)).shape
            out.append(Tensor(prefix + part.name, shape, found, (index,), part.layout))
        if not kind.dense:
            experts = _fused if family.fused else _separate
            out += experts(config, family.mlp, prefix + family.mlp.block, (*path, "moe"), index)
    return out


def _place(layers, layer: int) -> tuple[tuple[str | int, ...], int]:
    """Path of the stack that holds a layer, and where in it the layer lies."""
    if isinstance(layers, dict):
        return ("layers",), layer
    stack = 0
    while layer >= depth(layers[stack]):
        layer, stack = layer - depth(layers[stack]), stack + 1
    return ("layers", stack), layer


class _Part(NamedTuple):
    """A tensor of a layer that is one parameter: name below the layer, path in its stack."""

    name: str
    path: tuple[str, ...]
    layout: Layout = PLAIN


def _parts(config: ModelConfig, family, kind: LayerKind) -> list[_Part]:
    found = [
        _Part("input_layernorm.weight", ("attention_norm", "weight")),
        _Part("post_attention_layernorm.weight", ("moe_norm", "weight")),
    ]
    if kind.linear:
        found += _linear_attention()
    elif config.latent.kv_rank:
        found += _latent_attention(config)
    else:
        found += _attention(config)
    names = family.mlp
    if kind.dense:
        return found + _mlp(names, names.block, ("mlp",))
    if config.num_experts:
        router = f"{names.block}.{names.router}"
        found.append(_Part(f"{router}.weight", ("moe", "router")))
        if config.moe_bias:
            found.append(_Part(f"{router}.bias", ("moe", "router_bias")))
        if config.router.correction:
            name = f"{router}.e_score_correction_bias"
            found.append(_Part(name, ("moe", "router_correction")))
    if config.shared_dim:
        shared = f"{names.block}.{names.shared}"
        found += _mlp(names, shared, ("moe", "shared"))
        if config.shared_gate:
            found.append(_Part(f"{shared}_gate.weight", ("moe", "shared_gate", "weight")))
    return found


def _attention(config: ModelConfig) -> list[_Part]:
    found = []
    for part in ("q", "k", "v", "o"):
        found.append(_Part(f"self_attn.{part}_proj.weight", ("attention", part, "weight")))
        if config.attention_bias:
            found.append(_Part(f"self_attn.{part}_proj.bias", ("attention", part, "bias")))
    if config.qk_norm:
        for part in ("q_norm", "k_norm"):
            found.append(_Part(f"self_attn.{part}.weight", ("attention", part, "weight")))
    if config.sinks:
        found.append(_Part("self_attn.sinks", ("attention", "sinks")))
    return found


def _latent_attention(config: ModelConfig) -> list[_Part]:
    latent = config.latent
    queries = rotary_pairs(config.num_heads, latent.nope_dim, latent.rope_dim)
    keys = rotary_pairs(1, latent.kv_rank, latent.rope_dim)
    found = [
        ("kv_a_proj_with_mqa.weight", ("kv_down", "weight"), keys),
        ("kv_a_layernorm.weight", ("latent_norm", "weight"), PLAIN),
        ("kv_b_proj.weight", ("kv_up",), PLAIN),
        ("o_proj.weight", ("o", "weight"), PLAIN),
    ]
    if latent.q_rank:
        found += [
            ("q_a_proj.weight", ("q_down", "weight"), PLAIN),
            ("q_a_layernorm.weight", ("latent_q_norm", "weight"), PLAIN),
            ("q_b_proj.weight", ("q", "weight"), queries),
        ]
    else:
        found.append(("q_proj.weight", ("q", "weight"), queries))
    return [_Part(f"self_attn.{n}", ("attention", *path), layout) for n, path, layout in found]


def _linear_attention() -> list[_Part]:
    found = [
        ("in_proj_qkv.weight", ("qkv", "weight"), PLAIN),
        ("in_proj_z.weight", ("gate", "weight"), PLAIN),
        ("in_proj_b.weight", ("rate", "weight"), PLAIN),
        ("in_proj_a.weight", ("step", "weight"), PLAIN),
        ("conv1d.weight", ("conv",), CONVOLUTION),
        ("A_log", ("decay",), PLAIN),
        ("dt_bias", ("decay_bias",), PLAIN),
        ("norm.weight", ("out_norm", "weight"), PLAIN),
        ("out_proj.weight", ("o", "weight"), PLAIN),
    ]
    return [
        _Part(f"linear_attn.{n}", ("linear_attention", *path), layout) for n, path, layout in found
    ]


def _mlp(names, block: str, path: tuple[str, ...]) -> list[_Part]:
    parts = {"gate": names.gate, "up": names.up, "down": names.down}
    return [
        _Part(f"{block}.{name}.weight", (*path, part, "weight")) for part, name in parts.items()
    ]


def _separate(config: ModelConfig, names, block: str, path: tuple, layer: int) -> list[Tensor]:
    """One gate, up and down tensor an expert."""
    inner, hidden = config.expert_dim, config.hidden
    out = []
    for expert in range(max(config.num_experts, 1)):
        prefix = f"{block}.experts.{expert}." if config.num_experts else f"{block}."
        for name, leaf, rows, shape in (
            (names.gate, "gate_up", slice(0, inner), (inner, hidden)),
            (names.up, "gate_up", slice(inner, 2 * inner), (inner, hidden)),
            (names.down, "down", slice(0, hidden), (hidden, inner)),
        ):
            index = (layer, expert, rows)
            out.append(Tensor(f"{prefix}{name}.weight", shape, (*path, leaf), index))
    return out


def _fused(config: ModelConfig, names, block: str, path: tuple, layer: int) -> list[Tensor]:
    """GPT-OSS: all experts in one tensor, [experts, inputs, outputs]."""
    experts, inner, hidden = config.num_experts, config.expert_dim, config.hidden
    block = f"{block}.experts"
    return [
        Tensor(f"{block}.{name}", shape, (*path, leaf), (layer,), layout)
        for name, shape, leaf, layout in (
            ("gate_up_proj", (experts, hidden, 2 * inner), "gate_up", INTERLEAVED_TRANSPOSED),
            ("gate_up_proj_bias", (experts, 2 * inner), "gate_up_bias", INTERLEAVED),
            ("down_proj", (experts, inner, hidden), "down", TRANSPOSED),
            ("down_proj_bias", (experts, hidden), "down_bias", PLAIN),
        )
    ]
