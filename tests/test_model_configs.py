"""Published models by shapes alone: parameters, bytes, and which family they belong to."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trace_jax.config import freeze
from trace_jax.fp4 import MXFP4, NVFP4
from trace_jax.model import ModelConfig
from trace_jax.model.accounting import kv_bytes_per_token, weight_bytes
from trace_jax.model.families import config_from_hub, config_to_hub, family_of
from trace_jax.model.tensors import parameter_count

ROOT = Path(__file__).resolve().parent.parent
# Published totals and active parameters, in billions; OpenAI's 3.61 leaves out the embedding.
PUBLISHED = {
    "qwen3_30b_a3b": ("qwen3_moe", 30.53, 3.35),
    "olmoe_1b_7b": ("olmoe", 6.92, 1.28),
    "gpt_oss_20b": ("gpt_oss", 20.91, 3.61),
}


def config_of(name):
    return freeze(importlib.import_module(f"configs.{name}").get_config()).model


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_those_published(name):
    family, total, active = PUBLISHED[name]
    config = config_of(name)
    assert family_of(config) == family
    assert parameter_count(config) / 1e9 == pytest.approx(total, abs=0.01)
    left_out = config.vocab_size * config.hidden / 1e9 if family == "gpt_oss" else 0.0
    found = parameter_count(config, active=True) / 1e9 - left_out
    assert found == pytest.approx(active, abs=0.01)
    assert config_from_hub(config_to_hub(config)) == config


def test_bytes_of_qwen3_30b():
    config = config_of("qwen3_30b_a3b")
    assert weight_bytes(config, None) == 2 * parameter_count(config)
    experts = 48 * 128 * 3 * 768 * 2048
    assert weight_bytes(config, NVFP4) == 2 * (parameter_count(config) - experts) + (
        experts * 9 // 16 + 2 * 4 * 48 * 128
    )
    assert kv_bytes_per_token(config, None) == 48 * 2 * 4 * 128 * 2
    # 64 code bytes, 8 scale bytes, 1 outer exponent for each of 48 x 2 x 4 heads.
    assert kv_bytes_per_token(config, NVFP4) == 48 * 2 * 4 * 73


def test_inspect_prints_what_qwen3_30b_takes(tmp_path):
    """From a config.json alone, in a folder without weights."""
    hub = config_to_hub(config_of("qwen3_30b_a3b"))
    (tmp_path / "config.json").write_text(json.dumps(hub))
    line = [sys.executable, "-m", "experiments.inspect", f"--checkpoint={tmp_path}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert lines == [
        "family      qwen3_moe",
        "parameters  30.5 B total, 3.3 B active",
        "weights     56.87 GiB with experts in bf16",
        "weights     18.06 GiB with experts in nvfp4",
        "weights     17.21 GiB with experts in mxfp4",
        "KV-cache    98304 bytes a token in bf16",
        "KV-cache    28032 bytes a token in nvfp4",
        "guidance    13824 bytes a token (default plan)",
    ]
    assert json.loads(last)["guidance_bytes_per_token"] == 13824


def test_gpt_oss_has_whole_mxfp4_blocks():
    config = config_of("gpt_oss_20b")
    assert config.hidden % MXFP4.block == 0 and config.expert_dim % MXFP4.block == 0
    assert 11 < weight_bytes(config, MXFP4) / 2**30 < 13


def test_keys_in_every_fourth_layer():
    """The byte accounting of Qwen3.5-35B-A3B's attention; the model cannot be run yet."""
    config = ModelConfig(
        vocab_size=248_320,
        num_layers=40,
        hidden=2048,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        num_experts=256,
        top_k=8,
        expert_dim=512,
        full_attention_every=4,
    )
    assert config.attention_layers == tuple(range(3, 40, 4))
    assert kv_bytes_per_token(config, None) == 10 * 2 * 2 * 256 * 2
