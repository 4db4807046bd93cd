"""The tensors of a checkpoint: Hub name, shape, and where each lies in the parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from trace_jax.model.config import ModelConfig
from trace_jax.model.families import FAMILIES, family_of
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


class Tensor(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
      name, shape: as in the file.
      path: keys of the parameter that holds it.
      index: where in that parameter: stacked layer[, expert[, slice of rows]].
      layout: of the file's axes.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    index: tuple = ()
    layout: Layout = PLAIN


def param_shapes(config: ModelConfig) -> dict:
    """Parameter tree as ShapeDtypeStructs; allocates nothing."""
    return jax.eval_shape(partial(init, config), jax.random.key(0))


def parameter_count(config: ModelConfig, active: bool = False) -> int:
    """Parameters in total, or all but the experts that a token is not sent to (active)."""
    shapes = param_shapes(config)
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    if not active:
        return total
    moe = shapes["layers"]["moe"]
    unused = 0
    if config.num_experts:
        experts = sum(moe[k].size for k in ("gate_up", "down", "gate_up_bias") if k in moe)
        unused = experts * (config.num_experts - config.top_k) // config.num_experts
    return total - unused


def leaf_at(tree: dict, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key] if isinstance(tree, dict) else getattr(tree, key)
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
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, path in _plain(config, family):
            path = ("layers", *path)
            shape = leaf_at(shapes, path).shape[1:]
            out.append(Tensor(prefix + name, shape, path, (layer,)))
        experts = _fused if family.fused else _separate
        out += experts(config, family.mlp, prefix + family.mlp.block, layer)
    return out


def _plain(config: ModelConfig, family) -> list[tuple[str, tuple[str, ...]]]:
    """(Hub name, path) of a layer's tensors that are one parameter each."""
    found = [
        ("input_layernorm.weight", ("attention_norm", "weight")),
        ("post_attention_layernorm.weight", ("moe_norm", "weight")),
    ]
    for part in ("q", "k", "v", "o"):
        found.append((f"self_attn.{part}_proj.weight", ("attention", part, "weight")))
        if config.attention_bias:
            found.append((f"self_attn.{part}_proj.bias", ("attention", part, "bias")))
    if config.qk_norm:
        for part in ("q_norm", "k_norm"):
            found.append((f"self_attn.{part}.weight", ("attention", part, "weight")))
    if config.sinks:
        found.append(("self_attn.sinks", ("attention", "sinks")))
    if config.num_experts:
        router = f"{family.mlp.block}.{family.mlp.router}"
        found.append((f"{router}.weight", ("moe", "router")))
        if config.moe_bias:
            found.append((f"{router}.bias", ("moe", "router_bias")))
    return found


def _separate(config: ModelConfig, names, block: str, layer: int) -> list[Tensor]:
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
            path, index = ("layers", "moe", leaf), (layer, expert, rows)
            out.append(Tensor(f"{prefix}{name}.weight", shape, path, index))
    return out


def _fused(config: ModelConfig, names, block: str, layer: int) -> list[Tensor]:
    """GPT-OSS: all experts in one tensor, [experts, inputs, outputs]."""
    experts, inner, hidden = config.num_experts, config.expert_dim, config.hidden
    block = f"{block}.experts"
    return [
        Tensor(f"{block}.{name}", shape, ("layers", "moe", leaf), (layer,), layout)
        for name, shape, leaf, layout in (
            ("gate_up_proj", (experts, hidden, 2 * inner), "gate_up", INTERLEAVED_TRANSPOSED),
            ("gate_up_proj_bias", (experts, 2 * inner), "gate_up_bias", INTERLEAVED),
            ("down_proj", (experts, inner, hidden), "down", TRANSPOSED),
            ("down_proj_bias", (experts, hidden), "down_bias", PLAIN),
        )
    ]
