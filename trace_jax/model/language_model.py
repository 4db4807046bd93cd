"""The language model inside a vision-language checkpoint, as a source of its own tensors.

Qwen3.5-MoE is published so: the language model's names have another prefix, and a layer's
experts are two tensors, gate_up_proj [experts, 2 n, hidden] and down_proj [experts, hidden, n].
Vision and multi-token prediction are no part of the language model and are left out.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

PREFIX = "model.language_model."
OTHERS = ("model.visual.", "mtp.")
INSIDE = {"qwen3_5_moe": "qwen3_5_moe_text"}  # model_type: that of its language model


def language_config(hub: dict[str, Any]) -> dict[str, Any]:
    """config.json of the language model; any other config.json as it is."""
    family = INSIDE.get(hub.get("model_type"))
    if family is None:
        return hub
    if "text_config" not in hub:
        raise ValueError("config.json: text_config is missing")
    shared = {k: hub[k] for k in ("tie_word_embeddings", "quantization_config") if k in hub}
    return {**hub["text_config"], **shared, "model_type": family}


class _Where(NamedTuple):
    name: str  # in the file
    shape: tuple[int, ...]
    index: tuple = ()


class LanguageModel:
    """Tensors of the language model in `source`, under the names of the model alone."""

    def __init__(self, source):
        self._read = source.read
        self._read_fused = lru_cache(maxsize=2)(source.read)  # both tensors of a layer
        self._where = {
            name: where
            for file_name, shape in source.shapes().items()
            if not file_name.startswith(OTHERS)
            for name, where in _parts(file_name, shape)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: where.shape for name, where in self._where.items()}

    def read(self, name: str) -> np.ndarray:
        where = self._where[name]
        return self._read_fused(where.name)[where.index] if where.index else self._read(where.name)


def within(source) -> Any:
    """`source` itself, or the language model inside it."""
    inside = any(name.startswith(PREFIX) for name in source.shapes())
    return LanguageModel(source) if inside else source


def _parts(file_name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, _Where]]:
    """Names of the tensors that one of the file holds, and where in it they are."""
    name = file_name
    if name.startswith(PREFIX):
        name = "model." + name.removeprefix(PREFIX)
    stem, _, leaf = name.rpartition(".")
    if not stem.endswith(".experts") or leaf not in ("gate_up_proj", "down_proj"):
        yield name, _Where(file_name, shape)
        return
    experts, rows, columns = shape
    half = rows // 2
    parts = {"down_proj": slice(0, rows)}
    if leaf == "gate_up_proj":
        parts = {"gate_proj": slice(0, half), "up_proj": slice(half, rows)}
    for expert in range(experts):
        for part, cut in parts.items():
            where = _Where(file_name, (cut.stop - cut.start, columns), (expert, cut))
            yield f"{stem}.{expert}.{part}.weight", where
