"""How FP4 expert weights lie in checkpoints: compressed-tensors, ModelOpt, GPT-OSS MXFP4.

Codes are packed low nibble first and block scales lie row-major [N, K / block] in all
of them, as in a QTensor. What differs is names and the global scale: compressed-tensors
stores its reciprocal (weight_global_scale = 2688 / amax, shape [1]), ModelOpt the scale
itself (weight_scale_2 = amax / 2688, a scalar).
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


class Fp4Layout(NamedTuple):
    """A checkpoint's FP4 format.

    Attributes:
      format: of the QTensors that it loads into.
      expand: one expert tensor of the BF16 layout to its FP4 parts.
      quantization: config.json's quantization_config, given the modules left in BF16.
    """

    format: Format
    expand: Callable[[Tensor], list[Tensor]]
    quantization: Callable[[ModelConfig, list[str]], dict[str, Any]]


def is_fp4(tensor: Tensor) -> bool:
    """Whether a tensor of the BF16 layout is an expert weight, which FP4 exports quantize."""
    return tensor.path[-1] in ("gate_up", "down")


def reciprocal(outer: np.ndarray) -> np.ndarray:
    """FP32 g with 1 / g == outer where such a g exists, else the nearest.

    Of several, 2688 / amax as the format defines it, amax being a BF16 number.
    """
    one, top = np.float32(1), np.float32(2688)
    outer = np.asarray(outer, np.float32)
    g = one / outer
    amax = (outer * top).astype(ml_dtypes.bfloat16).astype(np.float32)
    candidates = (np.nextafter(g, np.float32(0)), np.nextafter(g, np.float32(np.inf)))
    for candidate in candidates:
        g = np.where((one / candidate == outer) & (one / g != outer), candidate, g)
    standard = top / amax
    return np.where(one / standard == outer, standard, g).astype(np.float32)


_BYTES = Layout(lambda a: a.view(np.uint8), lambda a: a.view(E4M3))
_RECIPROCAL = Layout(
    lambda a: (np.float32(1) / a.astype(np.float32)).reshape(1, 1),
    lambda a: reciprocal(a).reshape(1),
)
_SCALAR = Layout(lambda a: a.reshape(1, 1), lambda a: a.reshape(()))


def _separate(names: tuple[str, str, str], outer: Layout, outer_shape: tuple):
    """Parts of an expert's own [N, K] tensor; gate and up share the outer scale's place."""

    def expand(t: Tensor) -> list[Tensor]:
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


def _gpt_oss(t: Tensor) -> list[Tensor]:
    """Parts of all experts' weights: blocks [E, N, K / 32, 16] and scales [E, N, K / 32]."""
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
    "nvfp4": Fp4Layout(
        NVFP4,
        _separate(("weight_packed", "weight_scale", "weight_global_scale"), _RECIPROCAL, (1,)),
        _compressed_tensors,
    ),
    "nvfp4-modelopt": Fp4Layout(
        NVFP4, _separate(("weight", "weight_scale", "weight_scale_2"), _SCALAR, ()), _modelopt
    ),
    "mxfp4": Fp4Layout(MXFP4, _gpt_oss, _mxfp4),
}


def layout_of(config: ModelConfig, name: str) -> Fp4Layout:
    """The layout called `name`.

    Raises:
      ValueError: unknown, not of the family, or the widths are no whole blocks.
    """
    if name not in LAYOUTS:
        raise ValueError(f"unknown format {name!r}; write one of bf16, {', '.join(LAYOUTS)}")
    family, layout = family_of(config), LAYOUTS[name]
    if (name == "mxfp4") != FAMILIES[family].fused:
        fits = "bf16, mxfp4" if FAMILIES[family].fused else "bf16, nvfp4, nvfp4-modelopt"
        raise ValueError(f"{family} checkpoints have no {name} layout; write one of {fits}")
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
