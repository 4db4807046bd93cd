"""Published models by shapes alone: parameters, bytes, and which family they belong to."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trace_jax.config import freeze
from trace_jax.fp4 import FP8, MXFP4, NVFP4, GuidancePlan, guidance_bytes_per_token
from trace_jax.model import ModelConfig
from trace_jax.model.accounting import kv_bytes_per_token, state_bytes, weight_bytes
from trace_jax.model.config_parts import Latent, Router, Yarn
from trace_jax.model.families import config_from_hub, config_to_hub, family_of
from trace_jax.model.tensors import parameter_count

ROOT = Path(__file__).resolve().parent.parent
# Published totals and active parameters, in billions; OpenAI's 3.61 and the 3 of Qwen3.5 leave
# out the embedding, and 35 its vision tower.
PUBLISHED = {
    "qwen3_30b_a3b": ("qwen3_moe", 30.53, 3.35),
    "olmoe_1b_7b": ("olmoe", 6.92, 1.28),
    "gpt_oss_20b": ("gpt_oss", 20.91, 3.61),
    "qwen3_5_35b_a3b": ("qwen3_5_moe_text", 34.66, 2.95),
}


def config_of(name):
    return freeze(importlib.import_module(f"configs.{name}").get_config()).model


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_those_published(name):
    family, total, active = PUBLISHED[name]
    config = config_of(name)
    assert family_of(config) == family
    assert parameter_count(config) / 1e9 == pytest.approx(total, abs=0.01)
    left_out = config.vocab_size * config.hidden / 1e9
    left_out = left_out if family in ("gpt_oss", "qwen3_5_moe_text") else 0.0
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
    assert kv_bytes_per_token(config, FP8) == 48 * 2 * 4 * 129
    # A window keeps the rows in BF16 as well.
    assert kv_bytes_per_token(config, NVFP4, kv_window=64) == 48 * 2 * 4 * (73 + 256)
    assert kv_bytes_per_token(config, None, kv_window=64) == kv_bytes_per_token(config, None)


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
        "KV-cache    49536 bytes a token in fp8",
        "KV-cache    28032 bytes a token in nvfp4",
        "guidance    13824 bytes a token (default plan)",
    ]
    assert json.loads(last)["guidance_bytes_per_token"] == 13824


def test_gpt_oss_has_whole_mxfp4_blocks():
    config = config_of("gpt_oss_20b")
    assert config.hidden % MXFP4.block == 0 and config.expert_dim % MXFP4.block == 0
    assert 11 < weight_bytes(config, MXFP4) / 2**30 < 13


def test_qwen3_5_has_keys_in_every_fourth_layer():
    """The shape of test_guidance.py's byte table; states take the place of the other keys."""
    config = config_of("qwen3_5_35b_a3b")
    assert config.attention_layers == tuple(range(3, 40, 4))
    assert kv_bytes_per_token(config, None) == 10 * 2 * 2 * 256 * 2
    assert kv_bytes_per_token(config, NVFP4) == 10 * 2 * 2 * 145
    assert guidance_bytes_per_token(config, GuidancePlan()) == 8.4375 * 1024
    # 30 layers: three inputs of 8192 channels in BF16, 32 matrices of 128 x 128 in FP32.
    assert state_bytes(config) == 30 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)


DEEPSEEK = dict(
    top_k=6,
    norm_topk=False,
    qk_norm=False,
    tie_embeddings=False,
    head_dim=192,
    yarn=Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707),
    max_positions=163_840,
)
V2_LITE = ModelConfig(
    vocab_size=102_400,
    num_layers=27,
    hidden=2048,
    num_heads=16,
    num_kv_heads=16,
    num_experts=64,
    expert_dim=1408,
    dense_layers=1,
    dense_dim=10_944,
    shared_dim=2 * 1408,
    latent=Latent(kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
    **DEEPSEEK,
)
V3 = ModelConfig(
    vocab_size=129_280,
    num_layers=61,
    hidden=7168,
    num_heads=128,
    num_kv_heads=128,
    num_experts=256,
    expert_dim=2048,
    dense_layers=3,
    dense_dim=18_432,
    shared_dim=2048,
    latent=Latent(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128),
    router=Router("sigmoid", groups=8, top_groups=4, group_best=2, correction=True, scale=2.5),
    **DEEPSEEK
    | dict(top_k=8, norm_topk=True, yarn=Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)),
)


@pytest.mark.parametrize(
    "config, family, total, active",
    [(V2_LITE, "deepseek_v2", 15.7065, 2.4), (V3, "deepseek_v3", 671.0264, 37)],
    ids=["V2-Lite", "V3"],
)
def test_counts_of_deepseek(config, family, total, active):
    """Published: 15.7 B and 671 B; active without the embedding: 2.4 B and 37 B."""
    assert family_of(config) == family
    assert parameter_count(config) / 1e9 == pytest.approx(total, abs=1e-4)
    found = parameter_count(config, active=True) - config.vocab_size * config.hidden
    assert found / 1e9 == pytest.approx(active, rel=0.025)
    assert config_from_hub(config_to_hub(config)) == config


@pytest.mark.parametrize("config", [V2_LITE, V3], ids=["V2-Lite", "V3"])
def test_a_latent_is_all_that_deepseek_caches(config):
    """512 + 64 values a token and layer, whatever the number of heads."""
    assert kv_bytes_per_token(config, None) == config.num_layers * 576 * 2
    assert kv_bytes_per_token(config, NVFP4) == config.num_layers * (
        512 * 9 // 16 + 64 * 9 // 16 + 2
    )
    guided = GuidancePlan(layers="all", sites=("k", "v"))
    assert guidance_bytes_per_token(config, guided) == config.num_layers * 576 * 1.5 / 8
