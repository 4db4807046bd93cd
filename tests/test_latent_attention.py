"""Latent attention and rotary positions beyond the original context: factors and layouts."""

import dataclasses
import json
import math

import golden_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trace_jax
from trace_jax.model import layers, safetensors_dir
from trace_jax.model.config_parts import Llama3Rope, Yarn
from trace_jax.model.safetensors_dir import SafetensorsDir
from trace_jax.model.tensors import rotary_pairs

GOLDEN = golden_files.GOLDEN


def logits(config, params):
    tokens = golden_files.expected("deepseek_v3")["tokens"][:1]
    return np.asarray(trace_jax.forward(config, params, tokens).logits)[0]


@pytest.mark.parametrize("weight, factor", [(0.707, 1.5896), (1.0, 1.8739)])
def test_score_factors_of_deepseeks_yarn(weight, factor):
    """BR-094: V2-Lite and V3, 40 times the context; cosine and sine keep their size."""
    yarn = Yarn(40.0, 4096, mscale=weight, mscale_all_dim=weight)
    assert yarn.score_scale == pytest.approx(factor, abs=1e-4)
    assert yarn.scale == 1.0
    assert Yarn(40.0, 4096).score_scale == 1.0
    assert dataclasses.replace(yarn, mscale_all_dim=0.0).scale == 0.1 * math.log(40) + 1


def test_the_score_factor_shows_beyond_position_0_only():
    """BR-094."""
    config, params = golden_files.checkpoint("deepseek_v3")
    plain = dataclasses.replace(config.yarn, mscale=0.0, mscale_all_dim=0.0, attention_factor=1.0)
    with_factor = logits(config, params)
    without = logits(dataclasses.replace(config, yarn=plain), params)
    error = np.abs(with_factor - without).max(axis=-1) / with_factor.std()
    assert error[0] < 1e-5 and np.median(error[1:]) > 0.1


def test_rotary_rows_are_permuted_once_and_back():
    """BR-096: two heads of three rows without positions and four with."""
    layout = rotary_pairs(2, 3, 4)
    rows = np.arange(14)
    half_split = [0, 1, 2, 3, 5, 4, 6, 7, 8, 9, 10, 12, 11, 13]
    np.testing.assert_array_equal(layout.to_ours(rows), half_split)
    np.testing.assert_array_equal(layout.to_hub(layout.to_ours(rows)), rows)


@pytest.mark.parametrize("permutations", [0, 2])
def test_another_number_of_permutations_is_noticed(permutations):
    """BR-096: rows as in the file, or permuted twice; the first position shows nothing."""
    config, params = golden_files.checkpoint("deepseek_v3")
    latent = config.latent
    layout = rotary_pairs(config.num_heads, latent.nope_dim, latent.rope_dim)
    move = layout.to_hub if permutations == 0 else layout.to_ours
    stacks = []
    for stack in params["layers"]:
        attention = dict(stack["attention"])
        weight = np.stack([move(a) for a in np.asarray(attention["q"]["weight"])])
        attention["q"] = {"weight": jnp.asarray(weight)}
        stacks.append({**stack, "attention": attention})
    wrong = logits(config, {**params, "layers": tuple(stacks)})
    right = golden_files.expected("deepseek_v3")["logits"][0]
    assert np.abs(wrong - right).max() / right.std() > 0.1


@pytest.mark.parametrize("exact_in_bf16", [False, True])
@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_the_correction_is_exported_bit_equal_in_fp32(format, exact_in_bf16, tmp_path):
    """BR-081."""
    config, params = golden_files.checkpoint("deepseek_v3", "bfloat16")
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    wanted = SafetensorsDir(GOLDEN / "deepseek_v3").read(name)
    assert (wanted != wanted.astype(jnp.bfloat16).astype(np.float32)).any()
    if exact_in_bf16:
        wanted = np.round(wanted * 8) / 8
        moe = params["layers"][1]["moe"]
        correction = moe["router_correction"].at[1].set(wanted)
        experts = {**params["layers"][1], "moe": {**moe, "router_correction": correction}}
        params = {**params, "layers": (params["layers"][0], experts)}
    folder = trace_jax.save_checkpoint(tmp_path / "out", config, params, format)
    written = SafetensorsDir(folder).read(name)
    assert written.dtype == np.float32 and written.tobytes() == wanted.tobytes()
    again, reread = trace_jax.load_checkpoint(folder)
    assert again == config
    np.testing.assert_array_equal(reread["layers"][1]["moe"]["router_correction"][1], wanted)
    ignored = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    kept = set(ignored.get("ignore", []))
    assert format == "bf16" or "model.layers.1.mlp.shared_experts.up_proj" in kept


def test_multi_token_prediction_layers_are_left_out(tmp_path):
    """Published files have them behind the last layer; other unknown tensors stay an error."""
    source = SafetensorsDir(GOLDEN / "deepseek_v3")
    found = {name: source.read(name) for name in source.shapes()}
    found["model.layers.3.eh_proj.weight"] = found["model.layers.2.self_attn.o_proj.weight"]
    (tmp_path / "config.json").write_text((GOLDEN / "deepseek_v3" / "config.json").read_text())
    safetensors_dir.write(tmp_path, found.items(), 1 << 30)
    _, params = trace_jax.load_checkpoint(tmp_path, "float32")
    _, wanted = golden_files.checkpoint("deepseek_v3")
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    found["model.layers.4.eh_proj.weight"] = found.pop("model.layers.3.eh_proj.weight")
    safetensors_dir.write(tmp_path, found.items(), 1 << 30)
    with pytest.raises(ValueError, match="unexpected: model.layers.4.eh_proj.weight"):
        trace_jax.load_checkpoint(tmp_path)


def test_llama3_keeps_fast_pairs_slows_slow_ones_and_mixes_between():
    """Turns within the original context of 8192: above 4 kept, below 1 slowed eightfold."""
    rope = Llama3Rope(8.0, 1.0, 4.0, 8192)
    plain = np.asarray(layers.frequencies(64, 500_000.0), np.float64)
    got = np.asarray(layers.frequencies(64, 500_000.0, rope), np.float64)
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(got[turns > 4], plain[turns > 4], rtol=1e-6)
    np.testing.assert_allclose(got[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    share = (turns[between] - 1) / 3
    mixed = plain[between] * (share + (1 - share) / 8)
    np.testing.assert_allclose(got[between], mixed, rtol=1e-5)
    assert between.sum() >= 5 and (turns > 4).sum() >= 5 and (turns < 1).sum() >= 5


def test_only_the_leading_part_of_a_head_turns():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 16)), jnp.float32)
    positions = jnp.array([[0, 5, 9]])
    turned = layers.rotary(x, positions, 10_000.0, fraction=0.25)
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(turned[..., :4], layers.rotary(x[..., :4], positions, 10_000.0))
    assert np.abs(turned - x)[:, 1:, :, :4].min() > 1e-6
