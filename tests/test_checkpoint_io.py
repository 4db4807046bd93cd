"""Import refuses what does not fit; export is atomic, exact, and reads back bit for bit."""

import json
import shutil
import struct

import golden_files
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import trace_jax
from trace_jax import fp4, model, sync
from trace_jax.fp4 import QTensor
from trace_jax.model import ModelConfig, checkpoint_export, safetensors_dir
from trace_jax.model.families import config_from_hub, config_to_hub, family_of
from trace_jax.model.fp4_layouts import global_scale, outer_of
from trace_jax.model.safetensors_dir import SafetensorsDir
from trace_jax.model.tensors import parameter_count, tensors

GOLDEN = golden_files.GOLDEN
family = pytest.mark.parametrize("family", golden_files.ALL)


def read_hub(family):
    return json.loads((GOLDEN / family / "config.json").read_text())


def bits(tree):
    """{path: bytes} of every leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(p): (a.dtype, np.asarray(a).tobytes()) for p, a in leaves}


def edited(tmp_path, family, edit):
    """A copy of a golden checkpoint whose tensors went through `edit`."""
    folder = tmp_path / "edited"
    folder.mkdir()
    shutil.copy(GOLDEN / family / "config.json", folder)
    content = edit(load_file(GOLDEN / family / "model.safetensors"))
    save_file(content, folder / "model.safetensors")
    return folder


# --- config.json ------------------------------------------------------------------------


@family
def test_config_survives_the_round_trip(family):
    config, _ = golden_files.checkpoint(family, "bfloat16")
    assert family_of(config) == family
    assert config_from_hub(config_to_hub(config)) == config


@pytest.mark.parametrize(
    "family, change, named",
    [
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 8.0}}, "longrope"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "mscale": 1.0}}, "mscale"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3_moe", {"new_feature": 3}, "new_feature"),
        ("mixtral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ("gpt_oss", {"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ("olmoe", {"model_type": "bert"}, "bert"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"topk_method": "random"}, "topk_method"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("qwen3_5_moe_text", {"attn_output_gate": False}, "attn_output_gate"),
        (
            "qwen3_5_moe_text",
            {"layer_types": ["full_attention", "linear_attention"] * 2},
            "layer_types",
        ),
    ],
)
def test_an_unsupported_field_is_named(family, change, named):
    with pytest.raises(ValueError, match=named):
        config_from_hub(read_hub(family) | change)


def test_a_missing_field_is_named():
    hub = read_hub("llama")
    del hub["intermediate_size"]
    with pytest.raises(ValueError, match="intermediate_size is missing"):
        config_from_hub(hub)


def test_yarn_attention_factor_of_the_config_is_used_verbatim():
    """BR-095; the default for GPT-OSS's factor 32 is 1.3466."""
    hub = read_hub("gpt_oss")
    hub["rope_parameters"] = hub["rope_parameters"] | {"factor": 32.0}
    assert config_from_hub(hub).yarn.scale == pytest.approx(1.3466, abs=1e-4)
    hub["rope_parameters"]["attention_factor"] = 1.0
    assert config_from_hub(hub).yarn.scale == 1.0


# --- import -----------------------------------------------------------------------------


def test_missing_unexpected_and_misshaped_tensors_are_listed(tmp_path):
    """BR-099."""

    def edit(t):
        t["model.layers.0.renamed.weight"] = t.pop("model.layers.0.mlp.up_proj.weight")
        t["model.norm.weight"] = t["model.norm.weight"][:-1]
        return t

    with pytest.raises(ValueError) as error:
        trace_jax.load_checkpoint(edited(tmp_path, "qwen3", edit))
    for text in (
        "missing: model.layers.0.mlp.up_proj.weight",
        "unexpected: model.layers.0.renamed.weight",
        "misshaped: model.norm.weight [31], not [32]",
    ):
        assert text in str(error.value)


def test_a_tied_model_may_repeat_its_embedding_but_not_change_it(tmp_path):
    def edit(t):
        return t | {"lm_head.weight": t["model.embed_tokens.weight"].copy()}

    folder = edited(tmp_path, "llama", edit)
    _, params = trace_jax.load_checkpoint(folder)
    assert "unembed" not in params
    content = load_file(folder / "model.safetensors")
    content["lm_head.weight"][0] = 3.0
    save_file(content, folder / "model.safetensors")
    with pytest.raises(ValueError, match="tied"):
        trace_jax.load_checkpoint(folder)


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    folder = edited(tmp_path, "llama", lambda t: t)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="cut short"):
        trace_jax.load_checkpoint(folder)


def test_each_layer_and_expert_lands_in_its_place(tmp_path):
    """BR-102."""
    folder = tmp_path / "marked"
    folder.mkdir()
    shutil.copy(GOLDEN / "olmoe" / "config.json", folder)
    content = load_file(GOLDEN / "olmoe" / "model.safetensors")
    for name, value in content.items():
        if ".experts." in name:
            parts = name.split(".")
            content[name] = np.full_like(value, 100 * int(parts[2]) + int(parts[5]))
    save_file(content, folder / "model.safetensors")
    config, params = trace_jax.load_checkpoint(folder)
    for leaf in ("gate_up", "down"):
        got = np.asarray(params["layers"]["moe"][leaf], np.float32)
        for layer in range(config.num_layers):
            for expert in range(config.num_experts):
                assert (got[layer, expert] == 100 * layer + expert).all()


def test_gpt_oss_gate_rows_are_the_even_columns():
    """BR-089."""
    stored = load_file(GOLDEN / "gpt_oss" / "model.safetensors")
    columns = stored["model.layers.1.mlp.experts.gate_up_proj"]
    _, params = golden_files.checkpoint("gpt_oss", "bfloat16")
    ours = np.asarray(params["layers"]["moe"]["gate_up"])[1]
    np.testing.assert_array_equal(ours[:, :32], columns[:, :, 0::2].swapaxes(1, 2))
    np.testing.assert_array_equal(ours[:, 32:], columns[:, :, 1::2].swapaxes(1, 2))


# --- export -----------------------------------------------------------------------------


@family
def test_bf16_round_trip_is_bit_equal(family, tmp_path):
    """Sharded or not, names included: the exported tensors are those of transformers."""
    config, params = golden_files.checkpoint(family, "bfloat16")
    folder = trace_jax.save_checkpoint(
        tmp_path / "out",
        config,
        params,
        max_shard_bytes=20_000,
        files=checkpoint_export.companions(GOLDEN / family),
    )
    again, reread = trace_jax.load_checkpoint(folder)
    assert again == config and bits(reread) == bits(params)
    ours, theirs = SafetensorsDir(folder), SafetensorsDir(GOLDEN / family)
    assert ours.shapes() == theirs.shapes()
    for name in ours.shapes():
        np.testing.assert_array_equal(ours.read(name), theirs.read(name))
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


FP4_CASES = [
    ("qwen3_moe", "nvfp4"),
    ("qwen3_moe", "nvfp4-modelopt"),
    ("llama", "nvfp4"),
    ("gpt_oss", "mxfp4"),
    ("gpt_oss", "nvfp4"),
    ("gpt_oss", "nvfp4-modelopt"),
]


@pytest.mark.parametrize("family, format", FP4_CASES)
def test_fp4_exports_decode_to_what_rollout_uses(family, format, tmp_path):
    config, params = golden_files.checkpoint(family, "bfloat16")
    folder = trace_jax.save_checkpoint(tmp_path / "out", config, params, format)
    again, imported = trace_jax.load_checkpoint(folder)
    assert again == config
    name = "mxfp4" if format == "mxfp4" else "nvfp4"
    policy = fp4.PrecisionPolicy((fp4.Rule("expert_weight", name),))
    rollout = sync.to_rollout(params, policy.resolve(config.num_layers))["layers"][0]
    for leaf in sync.EXPERT_WEIGHTS:
        mine, theirs = imported["layers"]["moe"][leaf], rollout["moe"][leaf]
        for part in ("packed", "block_scale", "outer"):
            np.testing.assert_array_equal(getattr(mine, part), getattr(theirs, part))
    for leaf in ("gate_up_bias", "down_bias", "router"):
        if leaf in params["layers"]["moe"]:
            got, wanted = imported["layers"]["moe"][leaf], params["layers"]["moe"][leaf]
            np.testing.assert_array_equal(got, wanted)
    once_more = trace_jax.save_checkpoint(tmp_path / "again", again, imported, format)
    assert bits(trace_jax.load_checkpoint(once_more)[1]) == bits(imported)


def test_outer_scales_survive_the_stored_reciprocal():
    """Every BF16 maximum exactly, and the standard 2688 / amax in the file; see `outer_of`."""
    amax = np.arange(0x3000, 0x4800, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    outer = amax / np.float32(2688)
    np.testing.assert_array_equal(global_scale(outer), np.float32(2688) / amax)
    np.testing.assert_array_equal(outer_of(global_scale(outer)), outer)
    lost = np.mean(np.float32(1) / global_scale(outer) != outer)
    assert lost > 0.125, "the plain reciprocal would do"
    foreign = np.random.default_rng(0).uniform(1, 4000, 10_000).astype(np.float32)
    np.testing.assert_array_equal(outer_of(global_scale(outer_of(foreign))), outer_of(foreign))


def test_global_scales_of_both_nvfp4_layouts(tmp_path):
    """BR-103, BR-109: amax 0.75 -> 3584 of shape [1], 0.75 / 2688 as a scalar."""
    config, params = golden_files.checkpoint("llama", "bfloat16")
    params = jax.tree.map(lambda a: a, params)
    gate_up = params["layers"]["moe"]["gate_up"]
    params["layers"]["moe"]["gate_up"] = (gate_up * 0).at[:, :, 0, 0].set(0.75)
    stem = "model.layers.0.mlp.gate_proj"
    ours = trace_jax.save_checkpoint(tmp_path / "ct", config, params, "nvfp4")
    tensors_ = SafetensorsDir(ours)
    assert tensors_.read(f"{stem}.weight_global_scale").tolist() == [3584.0]
    scales = tensors_.read(f"{stem}.weight_scale")
    assert scales.dtype == ml_dtypes.float8_e4m3fn and scales.shape == (32, 2)
    ours = trace_jax.save_checkpoint(tmp_path / "mo", config, params, "nvfp4-modelopt")
    scale = SafetensorsDir(ours).read(f"{stem}.weight_scale_2")
    assert scale.shape == () and scale == np.float32(0.75) / np.float32(2688)


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-modelopt"])
def test_the_exclusion_list_agrees_with_the_tensors(format, tmp_path):
    """BR-105, BR-107."""
    config, params = golden_files.checkpoint("qwen3_moe", "bfloat16")
    folder = trace_jax.save_checkpoint(tmp_path / "out", config, params, format)
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"} <= set(ignored)
    names = SafetensorsDir(folder).shapes()
    scaled = {n.rsplit(".", 1)[0] for n in names if n.endswith("weight_scale")}
    assert len(scaled) == 2 * 5 * 3 and not scaled & set(ignored)
    linear = {n.rsplit(".", 1)[0] for n in names if n.endswith("weight") and "norm" not in n}
    assert linear - scaled == set(ignored)


def test_masters_that_bf16_would_change_stay_fp32_only_where_rollouts_use_fp32(tmp_path):
    config, params = golden_files.checkpoint("qwen3_moe", "bfloat16")
    params = jax.tree.map(lambda a: a.astype(jnp.float32) * 1.001, params)
    folder = trace_jax.save_checkpoint(tmp_path / "out", config, params)
    dtypes = {n: SafetensorsDir(folder).read(n).dtype for n in SafetensorsDir(folder).shapes()}
    fp32 = {n for n, d in dtypes.items() if d == np.float32}
    assert all("norm" in n or n.endswith("mlp.gate.weight") for n in fp32) and len(fp32) > 5
    _, again = trace_jax.load_checkpoint(folder)
    np.testing.assert_array_equal(
        again["layers"]["moe"]["router"], params["layers"]["moe"]["router"]
    )


def test_a_tied_export_has_no_unembedding(tmp_path):
    """BR-097."""
    config, params = golden_files.checkpoint("llama", "bfloat16")
    folder = trace_jax.save_checkpoint(tmp_path / "out", config, params)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_exports_that_cannot_be_are_refused(tmp_path):
    config, params = golden_files.checkpoint("llama", "bfloat16")
    for format, text in (("mxfp4", "no mxfp4 layout"), ("nvfp9", "no nvfp9 layout")):
        with pytest.raises(ValueError, match=text):
            trace_jax.save_checkpoint(tmp_path / "out", config, params, format)
    with pytest.raises(ValueError, match="exists"):
        trace_jax.save_checkpoint(tmp_path, config, params)


def test_counts_by_shapes():
    config, params = golden_files.checkpoint("mixtral", "bfloat16")
    assert parameter_count(config) == sum(a.size for a in jax.tree.leaves(params))
    assert sum(np.prod(t.shape) for t in tensors(config)) == parameter_count(config)
    per_expert = 2 * 3 * 32 * 32
    total, active = parameter_count(config), parameter_count(config, active=True)
    assert total - active == 3 * per_expert


def test_header_of_another_dtype_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match="I64"):
        safetensors_dir.SafetensorsDir(tmp_path)


def test_imported_fp4_stays_packed(tmp_path):
    config, params = golden_files.checkpoint("gpt_oss", "bfloat16")
    folder = trace_jax.save_checkpoint(tmp_path / "out", config, params, "mxfp4")
    _, imported = trace_jax.load_checkpoint(folder)
    weight = imported["layers"]["moe"]["down"]
    assert isinstance(weight, QTensor) and weight.format == fp4.MXFP4
    tokens = golden_files.expected("gpt_oss")["tokens"][:, :8]
    policy = fp4.PrecisionPolicy((fp4.Rule("expert_weight", "mxfp4"),))
    wanted = trace_jax.forward(config, params, tokens, policy).logits
    got = trace_jax.forward(config, imported, tokens).logits
    np.testing.assert_allclose(got, wanted, atol=1e-2 * float(jnp.std(wanted)))


def by_hand(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    """FP32 [N, K] as compressed-tensors stores it, in NumPy alone."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows, -1, 16)
    g = np.float32(2688) / np.abs(blocks).max()
    scale = (np.abs(blocks).max(-1) / 6 * g).astype(ml_dtypes.float8_e4m3fn)
    unit = blocks / (scale.astype(np.float32) / g)[..., None]
    grid = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    code = np.abs(np.abs(unit)[..., None] - grid).argmin(-1) + 8 * (unit < 0)
    code = code.reshape(rows, columns // 2, 2).astype(np.uint8)
    packed = code[..., 0] | code[..., 1] << 4
    return {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_global_scale": g.reshape(1)}


def test_every_expert_is_read_with_its_own_global_scale(tmp_path):
    """BR-110: value = code x block scale / weight_global_scale, near its BF16 source."""
    config = ModelConfig(32, 1, 32, 2, 1, 16, 16, num_experts=3, top_k=1, tie_embeddings=False)
    params = model.init(config, jax.random.key(0))
    random = np.random.default_rng(0)
    folder = trace_jax.save_checkpoint(tmp_path / "out", config, params, "nvfp4")
    stored = SafetensorsDir(folder)
    kept = {n: stored.read(n) for n in stored.shapes() if ".experts." not in n}
    source = {}
    for expert in range(3):
        for part, shape in (("gate", (16, 32)), ("up", (16, 32)), ("down", (32, 16))):
            name = f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
            source[name] = (10.0 ** (expert - 1) * random.standard_normal(shape)).astype(np.float32)
    for expert in range(3):  # gate and up share their scale, as kernels want them
        gate, up = (f"model.layers.0.mlp.experts.{expert}.{p}_proj.weight" for p in ("gate", "up"))
        source[gate][0, 0] = source[up][0, 0] = 5 * 10.0 ** (expert - 1)
    content = dict(kept)
    for name, weight in source.items():
        content |= by_hand(name, weight)
    save_file(content, folder / "model.safetensors")
    _, imported = trace_jax.load_checkpoint(folder)
    moe = {
        k: np.asarray(fp4.dequantize(imported["layers"]["moe"][k]), np.float32)[0]
        for k in ("gate_up", "down")
    }
    for name, weight in source.items():
        expert, part = int(name.split(".")[5]), name.split(".")[6]
        rows = {"gate_proj": slice(0, 16), "up_proj": slice(16, 32), "down_proj": slice(0, 32)}
        got = moe["down" if part == "down_proj" else "gate_up"][expert, rows[part]]
        error = np.sqrt(np.mean((got - weight) ** 2) / np.mean(weight**2))
        assert 0.05 < error < 0.15, name
    del content["model.layers.0.mlp.experts.1.up_proj.weight_global_scale"]
    save_file(content, folder / "model.safetensors")
    with pytest.raises(ValueError, match="missing: .*experts.1.up_proj.weight_global_scale"):
        trace_jax.load_checkpoint(folder)
