"""Weight sync: the learner's FP32 masters to the rollout's parameters."""

import jax
import jax.numpy as jnp

from trace_jax import fp4
from trace_jax.fp4 import LayerPrecision, QTensor
from trace_jax.kernels.expert_matmul import lay_out
from trace_jax.model.layers import KEPT_FP32, Dtype, expert_weight, rounded
from trace_jax.model.specs import depth, segments, stacks_of

EXPERT_WEIGHTS = ("gate_up", "down")
BIASES = ("gate_up_bias", "down_bias")


def to_rollout(params: dict, precision: tuple[LayerPrecision, ...]) -> dict:
    """Rollout parameters: BF16, with expert weights as QTensors where `precision` says.

    Everything is derived from `params` alone, so a second sync of the same
    parameters is a no-op and nothing of older weights survives. Expert weights
    are quantized from their BF16-rounded values, as the trainer's fake
    quantization does; the two are bit-equal. "layers" becomes a tuple with one
    stack for each run of layers of one kind and equal precision.

    The result never shares buffers with `params`: the learner donates those.
    """
    stacks, first = [], 0
    for stack in stacks_of(params["layers"]):
        last = first + depth(stack)
        for start, stop, formats_ in segments(precision[first:last]):
            run = _to_bf16(jax.tree.map(lambda a, i=start, j=stop: a[i:j], stack))
            stacks.append(_quantized(run, formats_.expert_weight))
        first = last
    return {**_to_bf16({k: v for k, v in params.items() if k != "layers"}), "layers": tuple(stacks)}


def _quantized(stack: dict, fmt) -> dict:
    """A stack with its expert weights in `fmt`; layers without experts have none."""
    if fmt is None or "moe" not in stack:
        return stack
    # [layers, experts, N, K]: one outer scale a layer and expert; gate and up are one
    # tensor and so share theirs.
    weights = {
        name: fp4.quantize(stack["moe"][name], fmt, outer_axes=(2, 3)) for name in EXPERT_WEIGHTS
    }
    return stack | {"moe": stack["moe"] | weights}


def _to_bf16(tree):
    def cast(path, a):
        names = {getattr(key, "key", None) for key in path}
        return jnp.copy(a) if names & set(KEPT_FP32) else a.astype(Dtype)

    return jax.tree_util.tree_map_with_path(cast, tree)


def decode_weights(params: dict) -> dict:
    """Rollout parameters with QTensors decoded to BF16 code x block scale, outer scale beside.

    For back ends without an FP4 product: decode once, outside the decode loop.
    """
    is_q = lambda a: isinstance(a, QTensor)
    return jax.tree.map(lambda a: expert_weight(a, None) if is_q(a) else a, params, is_leaf=is_q)


def by_layer(params: dict, kernels: bool) -> dict:
    """Rollout parameters as an unrolled decode program takes them: one stack a layer.

    Args:
      kernels: expert weights in the layout of the expert kernels; otherwise decoded.

    Derived from `params` alone, as `to_rollout` is; made once a weight sync.
    """
    layers = []
    for stack in params["layers"]:
        for i in range(jax.tree.leaves(stack)[0].shape[0]):
            layer = jax.tree.map(lambda a, i=i: a[i : i + 1], stack)
            layers.append(_with_kernel_weights(layer) if kernels else decode_weights(layer))
    return {**params, "layers": tuple(layers)}


def _with_kernel_weights(layer: dict) -> dict:
    layer = {**layer, **_with_one_projection(layer)}
    if "moe" not in layer:
        return layer
    moe = layer["moe"]
    one = jax.tree.map(lambda a: a[0], {n: moe[n] for n in (*EXPERT_WEIGHTS, *BIASES) if n in moe})
    half = one["gate_up"].shape[-2] // 2
    halves = [_rows(one["gate_up"], rows) for rows in (slice(None, half), slice(half, None))]
    gate_bias, up_bias, down_bias = None, None, None
    if "gate_up_bias" in one:
        gate_bias, up_bias = jnp.split(one["gate_up_bias"].astype(jnp.float32), 2, axis=-1)
        down_bias = one["down_bias"].astype(jnp.float32)
    laid_out = {
        "gate_up": lay_out(*halves, bias=gate_bias, up_bias=up_bias),
        "down": lay_out(one["down"], bias=down_bias),
    }
    if "router" in moe:
        laid_out["router"] = bf16_parts(moe["router"][0])
    return {**layer, "moe": moe | jax.tree.map(lambda a: a[None], laid_out)}


def bf16_parts(weights: jax.Array) -> jax.Array:
    """BF16 [3, ...] whose sum is FP32 `weights` [...]: BF16 products that add up to FP32's.

    The tensor cores have no FP32 product, and the router's is a tenth of a decode step's
    dense products without them.
    """
    parts, rest = [], weights
    for _ in range(3):
        parts.append(rounded(rest))
        rest = rest - parts[-1].astype(jnp.float32)
    return jnp.stack(parts)


def _rows(weight: QTensor | jax.Array, rows: slice) -> QTensor | jax.Array:
    """Some of the outputs of weights [experts, N, K]."""
    if not isinstance(weight, QTensor):
        return weight[:, rows]
    packed, scales = weight.packed[:, rows], weight.block_scale[:, rows]
    return weight.replace(packed=packed, block_scale=scales)


def _with_one_projection(layer: dict) -> dict:
    """Queries, keys and values by one product: their weights stacked along the outputs."""
    attention = layer.get("attention", {})
    if not {"q", "k", "v"} <= attention.keys():
        return {}
    rest = {name: value for name, value in attention.items() if name not in ("q", "k", "v")}
    parts = [attention[name] for name in ("q", "k", "v")]
    joined = jax.tree.map(lambda *a: jnp.concatenate(a, axis=1), *parts)
    return {"attention": {**rest, "qkv": joined}}


def weight_bytes(params: dict) -> int:
    """Bytes of rollout parameters as stored."""
    leaves = jax.tree.leaves(params, is_leaf=lambda a: isinstance(a, QTensor))
    return sum(a.nbytes for a in leaves)
