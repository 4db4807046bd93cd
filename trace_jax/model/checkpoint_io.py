"""Checkpoints of the Hub in: folders of safetensors, and GGUF files.

Import streams tensor by tensor into the stacked parameters; every name and shape is
checked before a byte is read. FP4 expert weights become QTensors, never BF16.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.fp4 import QTensor
from trace_jax.model.config import ModelConfig
from trace_jax.model.families import FAMILIES, config_from_hub, family_of
from trace_jax.model.fp4_layouts import Fp4Layout, layout_name, layout_of
from trace_jax.model.gguf_io import GgufFile, packaged_gguf
from trace_jax.model.language_model import language_config, within
from trace_jax.model.layers import KEPT_FP32
from trace_jax.model.safetensors_dir import SafetensorsDir, listed
from trace_jax.model.tensors import Tensor, leaf_at, param_shapes, tensors


def checkpoint_path(name: str | Path) -> Path:
    """A folder or GGUF file; pip:PACKAGE is the GGUF file inside an installed package."""
    text = str(name)
    return packaged_gguf(text.removeprefix("pip:")) if text.startswith("pip:") else Path(name)


def checkpoint_config(name: str | Path, dtype: str = "bfloat16") -> ModelConfig:
    """The model of a checkpoint; reads no tensor. Raises as `load_checkpoint` does."""
    path = checkpoint_path(name)
    hub = GgufFile(path).config if path.suffix == ".gguf" else read_hub_config(path)
    return config_from_hub(hub, dtype)


def load_checkpoint(
    name: str | Path, dtype: str = "bfloat16", *, mesh=None
) -> tuple[ModelConfig, dict]:
    """Reads a checkpoint folder (config.json and safetensors), or a GGUF file.

    Args:
      name: the folder or file; see `checkpoint_path`.
      dtype: "bfloat16" or "float32": of the parameters and of the model's activations.
        Norms, router, sinks and their like stay FP32.
      mesh: parameters go to their final sharding as they are read; None is one device.

    Returns:
      The configuration and the parameters as `model.apply` takes them. FP4 expert
      weights are QTensors.

    Raises:
      ValueError: an unsupported family, field or quantization; missing, unexpected or
        misshaped tensors; each time the names are listed.
    """
    path = checkpoint_path(name)
    if path.suffix == ".gguf":
        source = GgufFile(path)
        hub = source.config
    else:
        hub = read_hub_config(path)
        source = within(SafetensorsDir(path))
    config = config_from_hub(hub, dtype)
    format = layout_name(hub.get("quantization_config"))
    layout = None if format is None else layout_of(config, format)
    wanted = tensors(config)
    if layout is not None:
        wanted = [part for tensor in wanted for part in layout.expand(tensor)]
    _check(source.shapes(), wanted, config)
    return config, _fill(config, layout, wanted, source, mesh)


def read_hub_config(path: str | Path) -> dict[str, Any]:
    """config.json of the language model, with ModelOpt's separate quantization file if any."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} holds no checkpoint: config.json is missing")
    hub = language_config(json.loads(file.read_text()))
    separate = Path(path) / "hf_quant_config.json"
    if "quantization_config" not in hub and separate.is_file():
        found = json.loads(separate.read_text())["quantization"]
        hub["quantization_config"] = {"quant_method": "modelopt", **found}
    return hub


def _check(found: Mapping[str, tuple], wanted: list[Tensor], config: ModelConfig) -> None:
    shapes = {t.name: t.shape for t in wanted}
    optional = {n for n in found if n.endswith(("rotary_emb.inv_freq", "input_scale"))}
    if left_out := FAMILIES[family_of(config)].left_out:
        start = left_out.format(num_layers=config.num_layers)
        optional |= {n for n in found if n.startswith(start)}
    if config.tie_embeddings:
        optional.add("lm_head.weight")
    problems = {
        "missing": [n for n in shapes if n not in found],
        "unexpected": [n for n in found if n not in shapes and n not in optional],
        "misshaped": [
            f"{n} {list(found[n])}, not {list(s)}"
            for n, s in shapes.items()
            if n in found and tuple(found[n]) != tuple(s)
        ],
    }
    texts = [f"{kind}: {listed(names)}" for kind, names in problems.items() if names]
    if texts:
        raise ValueError(f"the checkpoint does not fit its config.json; {'; '.join(texts)}")


def param_dtype(path: tuple[str, ...], dtype: str) -> np.dtype:
    """Dtype that an imported parameter is held in."""
    return np.dtype(np.float32 if set(path) & set(KEPT_FP32) else jnp.dtype(dtype))


def _fill(config: ModelConfig, layout, wanted: list[Tensor], source, mesh) -> dict:
    params = _empty(config, layout, mesh)
    outers: dict[tuple, np.ndarray] = {}
    for tensor in wanted:
        value = tensor.layout.to_ours(source.read(tensor.name))
        if tensor.path[-1] == "outer":
            _check_outer(outers, tensor, value)
        _set(params, tensor.path, _written(leaf_at(params, tensor.path), tensor.index, value))
    if config.tie_embeddings and "lm_head.weight" in source.shapes():
        head, embed = (source.read(f"{n}.weight") for n in ("lm_head", "model.embed_tokens"))
        if not np.array_equal(head, embed):
            raise ValueError("lm_head.weight differs from the embedding that it is tied to")
    return params


def _check_outer(seen: dict, tensor: Tensor, value: np.ndarray) -> None:
    """Gate and up are one product here, so theirs must be one scale."""
    key = (tensor.path, tensor.index)
    if key in seen and not np.array_equal(seen[key], value):
        raise ValueError(f"{tensor.name} differs from that of its gate projection: not supported")
    seen[key] = value


def _empty(config: ModelConfig, layout: Fp4Layout | None, mesh) -> dict:
    """Zeroed parameters where they will stay: the host holds one tensor of a file at a time."""

    def empty(path, shape, dtype):
        keys = tuple(k.key for k in path if hasattr(k, "key"))
        if layout is not None and keys[-1] in ("gate_up", "down"):
            return _empty_qtensor(shape.shape, layout.format, config.dtype, zeros, path)
        return zeros(path, shape.shape, dtype or param_dtype(keys, config.dtype))

    def zeros(path, shape, dtype):
        if mesh is None:
            return jnp.zeros(shape, dtype)
        from trace_jax.parallel.rules import param_spec

        sharding = jax.sharding.NamedSharding(mesh, param_spec(path, shape, mesh))
        return jnp.zeros(shape, dtype, device=sharding)

    return jax.tree_util.tree_map_with_path(partial(empty, dtype=None), param_shapes(config))


def _empty_qtensor(shape, fmt, dtype, zeros, path) -> QTensor:
    *rows, columns = shape
    outer = zeros(path, (*rows[:2], 1, 1), np.float32)
    return QTensor(
        packed=zeros(path, (*rows, columns // 2), np.uint8),
        block_scale=zeros(path, (*rows, columns // fmt.block), np.uint8),
        outer=outer + np.float32(fmt.outer == "none"),
        format=fmt,
        axis=-1,
        length=columns,
        dtype=jnp.dtype(dtype),
    )


def _written(leaf, index: tuple, value: np.ndarray):
    """`leaf` with `value` at `index`, in place."""
    starts = [i.start if isinstance(i, slice) else i for i in index]
    starts += [0] * (leaf.ndim - len(starts))
    lead = leaf.ndim - value.ndim
    value = value.astype(leaf.dtype, copy=False).reshape((1,) * lead + value.shape)
    # Waited for: updates in flight would hold their tensors on the host.
    return jax.block_until_ready(_update(leaf, value, np.array(starts, np.int32)))


@partial(jax.jit, donate_argnums=0)
def _update(leaf, value, starts):
    return jax.lax.dynamic_update_slice(leaf, value, list(starts))


def _set(tree: dict, path: tuple[str, ...], value) -> None:
    holder = leaf_at(tree, path[:-1])
    if isinstance(holder, QTensor):
        leaf_at(tree, path[:-2])[path[-2]] = holder.replace(**{path[-1]: value})
    else:
        holder[path[-1]] = value
