"""Qwen3.5-MoE as it is published: a language model inside another, experts in one tensor."""

import json

import golden_files
import jax
import numpy as np
import pytest

import trace_jax
from trace_jax.model import safetensors_dir
from trace_jax.model.checkpoint_io import checkpoint_config
from trace_jax.model.safetensors_dir import SafetensorsDir

TEXT = golden_files.GOLDEN / "qwen3_5_moe_text"


def published() -> dict[str, np.ndarray]:
    """The golden model's tensors in the published layout, with vision and MTP beside them."""
    source, found = SafetensorsDir(TEXT), {}
    for name in source.shapes():
        outer = name.replace("model.", "model.language_model.", 1)
        if ".experts." not in name:
            found[outer] = source.read(name)
    for layer in range(4):
        block = f"layers.{layer}.mlp.experts"
        gate, up, down = (
            [source.read(f"model.{block}.{e}.{part}_proj.weight") for e in range(5)]
            for part in ("gate", "up", "down")
        )
        pairs = zip(gate, up, strict=True)
        fused = np.stack([np.concatenate(pair) for pair in pairs])
        found[f"model.language_model.{block}.gate_up_proj"] = fused
        found[f"model.language_model.{block}.down_proj"] = np.stack(down)
    found["model.visual.patch_embed.proj.weight"] = np.zeros((3, 2), np.float32)
    found["mtp.fc.weight"] = np.zeros((2, 2), np.float32)
    return found


def written(folder, tensors):
    inner = json.loads((TEXT / "config.json").read_text())
    hub = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": inner,
        "vision_config": {"depth": 2},
        "image_token_id": 60,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(hub))
    safetensors_dir.write(folder, tensors.items(), 1 << 30)
    return folder


def test_the_published_layout_gives_the_same_parameters(tmp_path):
    folder = written(tmp_path, published())
    config, params = trace_jax.load_checkpoint(folder, "float32")
    wanted_config, wanted = golden_files.checkpoint("qwen3_5_moe_text")
    assert config == wanted_config and checkpoint_config(folder, "float32") == config
    jax.tree.map(np.testing.assert_array_equal, params, wanted)


def test_what_is_neither_language_nor_known_besides_is_refused(tmp_path):
    tensors = published()
    tensors["model.audio.weight"] = np.zeros((2, 2), np.float32)
    del tensors["model.language_model.layers.2.mlp.experts.down_proj"]
    with pytest.raises(ValueError) as error:
        trace_jax.load_checkpoint(written(tmp_path, tensors))
    assert "unexpected: model.audio.weight" in str(error.value)
    assert "missing: model.layers.2.mlp.experts.0.down_proj.weight" in str(error.value)
