"""Checkpoints of the Hub out: what rollouts use, BF16 values as they are and expert weights
through the one codec.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from trace_jax import fp4
from trace_jax.fp4 import QTensor
from trace_jax.model import safetensors_dir
from trace_jax.model.checkpoint_io import param_dtype
from trace_jax.model.config import ModelConfig
from trace_jax.model.families import config_to_hub
from trace_jax.model.fp4_layouts import INPUT_SCALE, QUANTIZED, is_fp4, layout_of, modules_kept
from trace_jax.model.tensors import Tensor, leaf_at, tensors

BF16 = np.dtype(ml_dtypes.bfloat16)
ALWAYS_FP32 = ("router_correction",)  # in files, too, whatever their values
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def save_checkpoint(
    path: str | Path,
    config: ModelConfig,
    params: dict,
    format: str = "bf16",
    *,
    files: Mapping[str, str] | None = None,
    facts: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 4 << 30,
) -> Path:
    """Writes a checkpoint folder in the Hub's layout, whole or not at all.

    Args:
      path: the new folder; it must not exist.
      format: "bf16", "nvfp4" (compressed-tensors, weights only), "nvfp4-modelopt" or
        "mxfp4" (GPT-OSS only). FP4 formats quantize the expert weights, as rollouts do.
      files: {name: text} of companions that go along: see `companions`.
      facts: of the run, for the model card.
      max_shard_bytes: of one safetensors file.

    Raises:
      ValueError: the folder exists, the format does not fit the family, or a weight is
        quantized in another format already.
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} exists: write another folder")
    layout = None if format == "bf16" else layout_of(config, format)
    hub, plain = config_to_hub(config), tensors(config)
    scratch = path.with_name(f".{path.name}.saving")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed export
    scratch.mkdir(parents=True)
    try:
        safetensors_dir.write(scratch, _exported(params, plain, layout), max_shard_bytes)
        if layout is not None:
            hub["quantization_config"] = layout.quantization(config, modules_kept(plain))
        _write_companions(scratch, hub, format, files or {}, facts or {})
        scratch.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _exported(params, plain: list[Tensor], layout) -> Iterator[tuple[str, np.ndarray]]:
    quantized: dict[tuple, QTensor] = {}  # of one layer at a time
    for tensor in plain:
        leaf = leaf_at(params, tensor.path)
        key = (tensor.path, tensor.index[:1])
        if layout is not None and is_fp4(tensor) and key not in quantized:
            quantized = {k: v for k, v in quantized.items() if k[1] == key[1]}
            quantized[key] = _layer_qtensor(leaf, tensor.index[0], layout.format)
        for part in [tensor] if layout is None else layout.expand(tensor):
            if part.path[-1] in QUANTIZED:
                value = np.asarray(getattr(quantized[key], part.path[-1])[part.index[1:]])
                yield part.name, part.layout.to_hub(value)
            else:
                yield part.name, _bf16_value(leaf, part)
        for name in [] if layout is None else layout.input_scales(tensor):
            yield name, np.array(INPUT_SCALE)


def _layer_qtensor(leaf, layer: int, fmt) -> QTensor:
    """The expert weights [E, N, K] of a layer exactly as `sync.to_rollout` quantizes them."""
    if isinstance(leaf, QTensor):
        if leaf.format != fmt:
            raise ValueError(
                f"the expert weights are {leaf.format.name} already; export them in that format"
            )
        return jax.tree.map(lambda a: a[layer], leaf)
    weight = jnp.asarray(leaf[layer]).astype(jnp.bfloat16)
    return jax.jit(partial(fp4.quantize, format=fmt, outer_axes=(1, 2)))(weight)


def _bf16_value(leaf, tensor: Tensor) -> np.ndarray:
    """The file's values: BF16; FP32 where rollouts use FP32 and BF16 would change them, or
    where files of this kind always have FP32."""
    if isinstance(leaf, QTensor):
        layer, rest = tensor.index[0], tensor.index[1:]
        one = jax.tree.map(lambda a: a[layer], leaf)
        value = np.asarray(fp4.dequantize(one, jnp.bfloat16))[rest]
    else:
        value = np.asarray(leaf[tensor.index] if tensor.index else leaf)
    if tensor.path[-1] in ALWAYS_FP32:
        return tensor.layout.to_hub(np.asarray(value, np.float32))
    narrow = np.asarray(value).astype(BF16)
    kept = param_dtype(tensor.path, "bfloat16") == np.float32
    exact = not kept or np.array_equal(narrow.astype(np.float32), value)
    return tensor.layout.to_hub(narrow if exact else value.astype(np.float32))


def companions(folder: str | Path) -> dict[str, str]:
    """Texts of a checkpoint's tokenizer and generation files."""
    found = [Path(folder) / name for name in COMPANIONS]
    return {f.name: f.read_text(encoding="utf-8") for f in found if f.is_file()}


def _write_companions(folder: Path, hub: dict, format: str, files, facts) -> None:
    write = lambda name, value: (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    given = json.loads(files.get("generation_config.json", "{}"))
    hub |= {k: given[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in given}
    if format == "nvfp4-modelopt":
        quantization = {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": hub["quantization_config"]["ignore"],
        }
        write(
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": quantization},
        )
    rows = "".join(f"| {key} | {value} |\n" for key, value in facts.items())
    table = f"\n| | |\n|---|---|\n{rows}" if rows else ""
    (folder / "README.md").write_text(
        f"# {hub['model_type']} checkpoint, {format}\n\nExported by trace_jax. Expert weights "
        f"have the codes and scales that its rollouts used.\n{table}"
    )
    write("config.json", hub)  # last: a folder without it is no checkpoint
