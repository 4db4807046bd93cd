"""How FP4 expert weights lie in checkpoints: compressed-tensors, ModelOpt, GPT-OSS MXFP4.

Codes are packed low nibble first and block scales lie row-major [N, K / block], as in a
QTensor. What differs is names and the global scale: compressed-tensors stores its
reciprocal (weight_global_scale = 2688 / amax, shape [1]), ModelOpt the scale itself
(weight_scale_2 = amax / 2688, a scalar).

GPT-OSS stores all experts of a layer in one tensor. MXFP4 keeps that, and so does ModelOpt,
which leaves its [experts, inputs, outputs] order too (weight_scale_2 has one value an expert
here, where ModelOpt calibrates one for all). compressed-tensors knows Linear modules only:
each expert becomes three of them, with biases, as llm-compressor writes it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trace_jax.fp4 import MXFP4, NVFP4, Format
from trace_jax.model.config import ModelConfig
from trace_jax.model.families import FAMILIES, family_of
from trace_jax.model.tensors import INTERLEAVED, PLAIN, Layout, Tensor

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# ModelOpt's W4A4 loaders want a static scale of the activations. Rollouts scale each
# token by itself and nothing is calibrated: 1/16 covers values up to 168.
INPUT_SCALE = np.float32(1 / 16)


QUANTIZED = ("packed", "block_scale", "outer")  # parts of a QTensor


class Fp4Layout(NamedTuple):
    """A checkpoint's FP4 format.

    Attributes:
      format: of the QTensors that it loads into.
      expand: one tensor of the BF16 layout to those of this one; the parts of QTensors have
        paths that end in `QUANTIZED`.
      quantization: config.json's quantization_config, given the modules left in BF16.
      input_scales: names of the activation scales that go with a tensor.
    """

    format: Format
    expand: Callable[[Tensor], list[Tensor]]
    quantization: Callable[[ModelConfig, list[str]], dict[str, Any]]
    input_scales: Callable[[Tensor], list[str]] = lambda tensor: []


def is_fp4(tensor: Tensor) -> bool:
    """Whether a tensor of the BF16 layout is an expert weight, which FP4 exports quantize."""
    return tensor.path[-1] in ("gate_up", "down")


def _amax(outer: np.ndarray) -> np.ndarray:
    """The BF16 number whose outer scale this is, if it is one's."""
    return (outer * np.float32(2688)).astype(ml_dtypes.bfloat16).astype(np.float32)


def global_scale(outer: np.ndarray) -> np.ndarray:
    """FP32 weight_global_scale of outer scales: 2688 / amax, amax being a BF16 number.

    Of other outer scales (imported ones), the g with 1 / g == outer, or the nearest to it.
    """
    one, top = np.float32(1), np.float32(2688)
    outer = np.asarray(outer, np.float32)
    g = one / outer
    for candidate in (np.nextafter(g, np.float32(0)), np.nextafter(g, np.float32(np.inf))):
        g = np.where((one / candidate == outer) & (one / g != outer), candidate, g)
    amax = _amax(outer)
    return np.where(amax / top == outer, top / amax, g).astype(np.float32)


def outer_of(g: np.ndarray) -> np.ndarray:
    """FP32 outer scale of a weight_global_scale: amax / 2688, bit for bit, if g is 2688 / amax.

    1 / g may be an FP32 step off it (for 16 of the 128 mantissas of a BF16 amax no FP32 number
    has that reciprocal), so amax is found first. If there is none: 1 / g.
    """
    top = np.float32(2688)
    g = np.asarray(g, np.float32)
    amax = _amax(np.float32(1) / g)
    return np.where(top / amax == g, amax / top, np.float32(1) / g).astype(np.float32)


_BYTES = Layout(lambda a: a.view(np.uint8), lambda a: a.view(E4M3))
_RECIPROCAL = Layout(lambda a: outer_of(a).reshape(1, 1), lambda a: global_scale(a).reshape(1))
_SCALAR = Layout(lambda a: a.reshape(1, 1), lambda a: a.reshape(()))
_EACH = Layout(lambda a: a.reshape(-1, 1, 1), lambda a: a.reshape(-1))


def _then(first: Layout, second: Layout) -> Layout:
    """`first` nearest to the file."""
    return Layout(
        lambda a: second.to_ours(first.to_ours(a)), lambda a: first.to_hub(second.to_hub(a))
    )


def _separate(names: tuple[str, str, str], outer: Layout, outer_shape: tuple):
    """Parts of an expert's own [N, K] tensor; gate and up share the outer scale's place."""

    def expand(t: Tensor) -> list[Tensor]:
        if not is_fp4(t):
            return [t]
        rows, columns = t.shape
        stem = t.name.removesuffix("weight")
        packed, scale, second = names
        part = lambda name, *rest: Tensor(stem + name, *rest)
        return [
            part(packed, (rows, columns // 2), (*t.path, "packed"), t.index),
            part(scale, (rows, columns // 16), (*t.path, "block_scale"), t.index, _BYTES),
            part(second, outer_shape, (*t.path, "outer"), t.index[:2], outer),
        ]

    return expand


_COMPRESSED = _separate(("weight_packed", "weight_scale", "weight_global_scale"), _RECIPROCAL, (1,))


def _linear(t: Tensor) -> list[Tensor]:
    """GPT-OSS's fused experts as Linear modules of their own; other tensors as they are."""
    leaf = t.path[-1]
    if leaf.removesuffix("_bias") not in ("gate_up", "down") or t.path[-2] != "moe":
        return [t]
    bias, (layer,) = leaf.endswith("_bias"), t.index
    experts, *sides = t.shape
    inputs, outputs = (0, sides[0]) if bias else sides
    half = outputs // 2
    parts = {"down_proj": slice(0, outputs)}
    if leaf.startswith("gate_up"):
        parts = {"gate_proj": slice(0, half), "up_proj": slice(half, outputs)}
    block, kind = t.name.rsplit(".", 1)[0], "bias" if bias else "weight"
    out = []
    for expert in range(experts):
        for name, rows in parts.items():
            count = rows.stop - rows.start
            shape = (count,) if bias else (count, inputs)
            name = f"{block}.{expert}.{name}.{kind}"
            out.append(Tensor(name, shape, t.path, (layer, expert, rows)))
    return out


def _linear_compressed(t: Tensor) -> list[Tensor]:
    return [part for plain in _linear(t) for part in _COMPRESSED(plain)]


def _fused_modelopt(t: Tensor) -> list[Tensor]:
    """Parts of all experts' weights, in the BF16 order: codes [E, K / 2, N] and scales."""
    if not is_fp4(t):
        return [t]
    experts, columns, rows = t.shape
    part = lambda suffix, *rest: Tensor(t.name + suffix, *rest)
    packed, scales = (experts, columns // 2, rows), (experts, columns // 16, rows)
    return [
        part("", packed, (*t.path, "packed"), t.index, t.layout),
        part("_weight_scale", scales, (*t.path, "block_scale"), t.index, _then(_BYTES, t.layout)),
        part("_weight_scale_2", (experts,), (*t.path, "outer"), t.index, _EACH),
    ]


def _fused_mxfp4(t: Tensor) -> list[Tensor]:
    """Parts of all experts' weights: blocks [E, N, K / 32, 16] and scales [E, N, K / 32]."""
    if not is_fp4(t):
        return [t]
    experts, columns, rows = t.shape  # the BF16 layout is transposed, this one is not
    blocks = columns // 32
    rows_as = INTERLEAVED if t.path[-1] == "gate_up" else PLAIN
    packed = Layout(
        lambda a: rows_as.to_ours(a.reshape(experts, rows, columns // 2)),
        lambda a: rows_as.to_hub(a).reshape(experts, rows, blocks, 16),
    )
    shape = (experts, rows, blocks)
    return [
        Tensor(f"{t.name}_blocks", (*shape, 16), (*t.path, "packed"), t.index, packed),
        Tensor(f"{t.name}_scales", shape, (*t.path, "block_scale"), t.index, rows_as),
    ]


def _compressed_tensors(config: ModelConfig, ignore: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": 16,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _modelopt(config: ModelConfig, ignore: list[str]) -> dict[str, Any]:
    group = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": group, "input_activations": group}
        },
        "ignore": ignore,
        "producer": {"name": "modelopt"},
    }


def _mxfp4(config: ModelConfig, ignore: list[str]) -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": ignore}


LAYOUTS = {
    "nvfp4": Fp4Layout(NVFP4, _COMPRESSED, _compressed_tensors),
    "nvfp4-modelopt": Fp4Layout(
        NVFP4,
        _separate(("weight", "weight_scale", "weight_scale_2"), _SCALAR, ()),
        _modelopt,
        lambda t: [f"{t.name.removesuffix('weight')}input_scale"] if is_fp4(t) else [],
    ),
}
FUSED_LAYOUTS = {
    "mxfp4": Fp4Layout(MXFP4, _fused_mxfp4, _mxfp4),
    "nvfp4": Fp4Layout(NVFP4, _linear_compressed, _compressed_tensors),
    "nvfp4-modelopt": Fp4Layout(
        NVFP4,
        _fused_modelopt,
        _modelopt,
        lambda t: [f"{t.name}_input_scale"] if is_fp4(t) else [],
    ),
}


def layout_of(config: ModelConfig, name: str) -> Fp4Layout:
    """The layout called `name`.

    Raises:
      ValueError: unknown, not of the family, or the widths are no whole blocks.
    """
    family = family_of(config)
    layouts = FUSED_LAYOUTS if FAMILIES[family].fused else LAYOUTS
    if name not in layouts:
        raise ValueError(
            f"{family} checkpoints have no {name} layout; write one of bf16, {', '.join(layouts)}"
        )
    layout = layouts[name]
    for field in ("hidden", "expert_dim"):
        if getattr(config, field) % layout.format.block:
            raise ValueError(
                f"{name}: {field} is {getattr(config, field)}, no multiple of the "
                f"{layout.format.block} values of a block"
            )
    return layout


def layout_name(quantization: Mapping[str, Any] | None) -> str | None:
    """The layout that a config.json's quantization_config speaks of; None is BF16.

    Raises:
      ValueError: another quantization, named.
    """
    if not quantization:
        return None
    method = quantization.get("quant_method")
    if method == "compressed-tensors" and quantization.get("format") == "nvfp4-pack-quantized":
        return "nvfp4"
    if method == "modelopt" and quantization.get("quant_algo") == "NVFP4":
        return "nvfp4-modelopt"
    if method == "mxfp4":
        return "mxfp4"
    detail = quantization.get("format") or quantization.get("quant_algo")
    raise ValueError(f"config.json: quantization {method!r} ({detail}) is not supported")


def modules_kept(tensors: list[Tensor]) -> list[str]:
    """Names of the Linear-like modules that stay in BF16: all but the expert weights."""
    kept = {
        t.name.rsplit(".", 1)[0] for t in tensors if not is_fp4(t) and t.name.endswith(".weight")
    }
    return sorted({*kept, "lm_head"} - {m for m in kept if "norm" in m})
