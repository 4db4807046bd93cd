"""Exports as other libraries read them: transformers, compressed-tensors, ModelOpt's convention.

Needs the dev extra (torch on the CPU is enough); skipped, with the reason, where it is missing.
What an FP4 export decodes to is compared with what rollouts use, `sync.to_rollout`.
"""

import json

import chat_checkpoints
import golden_files
import ml_dtypes
import numpy as np
import pytest

import trace_jax
from trace_jax import fp4, sync
from trace_jax.model import checkpoint_export
from trace_jax.model.safetensors_dir import SafetensorsDir

WRITE = "write: pip install -e '.[dev]'"
torch = pytest.importorskip("torch", reason=f"torch is not installed; {WRITE}")
transformers = pytest.importorskip("transformers", reason=f"no transformers; {WRITE}")

BF16 = np.dtype(ml_dtypes.bfloat16)
GRID = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
family = pytest.mark.parametrize("family", golden_files.ALL)


def export(family, format, folder):
    """An export of a golden checkpoint and the weights of the rollout that it claims to hold."""
    config, params = golden_files.checkpoint(family, "bfloat16")
    out = trace_jax.save_checkpoint(folder / "out", config, params, format)
    name = "mxfp4" if format == "mxfp4" else "nvfp4"
    policy = fp4.PrecisionPolicy((fp4.Rule("expert_weight", name),))
    moe = sync.to_rollout(params, policy.resolve(config.num_layers))["layers"][0]["moe"]
    decoded = {leaf: np.asarray(fp4.dequantize(moe[leaf])) for leaf in sync.EXPERT_WEIGHTS}
    return config, SafetensorsDir(out), decoded


def as_torch(a: np.ndarray):
    """The same bytes as a tensor; NumPy's FP8 and BF16 are not torch's."""
    kinds = {BF16: torch.bfloat16, np.dtype(ml_dtypes.float8_e4m3fn): torch.float8_e4m3fn}
    if a.dtype not in kinds:
        return torch.from_numpy(np.array(a))
    raw = np.array(a).view(np.uint8).reshape(*a.shape, a.dtype.itemsize)
    return torch.from_numpy(raw).view(kinds[a.dtype]).reshape(a.shape)


def parts_of(decoded, config, names):
    """(module name, rollout's BF16 weight [N, K]) of every expert projection of one layer."""
    inner = config.expert_dim
    for layer in range(config.num_layers):
        for expert in range(max(config.num_experts, 1)):
            gate_up = decoded["gate_up"][layer, expert]
            yield names(layer, expert, "gate"), gate_up[:inner]
            yield names(layer, expert, "up"), gate_up[inner:]
            yield names(layer, expert, "down"), decoded["down"][layer, expert]


NAMES = {
    "llama": lambda layer, expert, part: f"model.layers.{layer}.mlp.{part}_proj",
    "qwen3_moe": lambda layer, expert, part: (
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
    ),
}
NAMES["gpt_oss"] = NAMES["qwen3_moe"]


# --- BF16 ---------------------------------------------------------------------------------


@family
@torch.no_grad()
def test_transformers_computes_our_logits_from_a_bf16_export(family, tmp_path):
    config, params = golden_files.checkpoint(family, "float32")
    files = checkpoint_export.companions(golden_files.GOLDEN / family)
    out = trace_jax.save_checkpoint(tmp_path / "out", config, params, files=files)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"], told
    tokens = golden_files.expected(family)["tokens"]
    theirs = model.eval()(torch.from_numpy(tokens).long()).logits.numpy()
    ours = np.asarray(trace_jax.forward(config, params, tokens).logits)
    assert np.abs(ours - theirs).max() < 1e-4 * theirs.std()
    assert model.generation_config.eos_token_id == 2


# --- NVFP4 --------------------------------------------------------------------------------


def compressed(tensors, module):
    """The module's tensors as compressed-tensors takes them."""
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    return {n: as_torch(tensors.read(f"{module}.{n}")) for n in names}


@pytest.mark.parametrize("family", NAMES)
def test_compressed_tensors_decompresses_to_the_rollouts_weights(family, tmp_path):
    """Its own arithmetic is code x (block scale / global scale), which rounds FP32 twice where
    rollouts round once. Of the 112,896 products of a code, a block scale and the outer scale of a
    BF16 maximum 87 then lie on the other side of a BF16 tie; all others are bit-equal.
    """
    pytest.importorskip("compressed_tensors", reason=f"no compressed-tensors; {WRITE}")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config, tensors, decoded = export(family, "nvfp4", tmp_path)
    hub = json.loads((tensors.folder / "config.json").read_text())
    scheme = QuantizationConfig(**hub["quantization_config"]).config_groups["group_0"]
    decompress = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").decompress
    off = total = 0
    for module, wanted in parts_of(decoded, config, NAMES[family]):
        weight = decompress(compressed(tensors, module), scheme)["weight"]
        got = weight.float().numpy()
        wanted = wanted.astype(np.float32)
        np.testing.assert_allclose(got, wanted, rtol=2**-7, atol=0)
        off, total = off + np.sum(got != wanted), total + wanted.size
    print(f"{off} of {total} values differ")
    assert off <= 1e-3 * total


@pytest.mark.parametrize("reader", ["published formula", "modelopt"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_modelopt_layout_decodes_to_the_rollouts_weights(family, reader, tmp_path):
    """weight = code x weight_scale x weight_scale_2, low nibble first, scales row-major."""
    config, tensors, decoded = export(family, "nvfp4-modelopt", tmp_path)
    decode = by_formula if reader == "published formula" else by_modelopt()
    for module, wanted in parts_of(decoded, config, NAMES[family]):
        names = ("weight", "weight_scale", "weight_scale_2")
        got = decode(*(tensors.read(f"{module}.{n}") for n in names))
        np.testing.assert_array_equal(got.astype(BF16), wanted)
        assert tensors.read(f"{module}.input_scale").shape == ()


def by_formula(packed, scale, second) -> np.ndarray:
    """FP32 [..., N, K] in plain NumPy."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    scales = np.repeat(scale.astype(np.float32), 16, axis=-1)
    return GRID[codes] * scales * second.reshape(second.shape + (1,) * (codes.ndim - second.ndim))


def by_modelopt():
    try:
        from modelopt.torch.quantization.qtensor import NVFP4QTensor
    except ImportError as error:
        pytest.skip(f"nvidia-modelopt: {error}; write: pip install nvidia-modelopt omegaconf")

    def decode(packed, scale, second):
        shape = (*packed.shape[:-1], 2 * packed.shape[-1])
        stored = NVFP4QTensor(torch.Size(shape), torch.float32, as_torch(packed))
        scales = {"scale": as_torch(scale), "double_scale": as_torch(second)}
        return stored.dequantize(dtype=torch.float32, block_sizes={-1: 16}, **scales).numpy()

    return decode


def test_modelopt_layout_of_fused_experts(tmp_path):
    """GPT-OSS: codes and scales in the order of the BF16 tensor, [experts, inputs, outputs]."""
    config, tensors, decoded = export("gpt_oss", "nvfp4-modelopt", tmp_path)
    for layer in range(config.num_layers):
        for leaf, name in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            packed, scale = tensors.read(stem), tensors.read(f"{stem}_weight_scale")
            second = tensors.read(f"{stem}_weight_scale_2")
            swap = lambda a: np.ascontiguousarray(np.swapaxes(a, 1, 2))
            got = by_formula(swap(packed), swap(scale), second).astype(BF16)
            if leaf == "gate_up":  # columns are gate 0, up 0, gate 1, ...
                got = np.concatenate([got[:, 0::2], got[:, 1::2]], axis=1)
            np.testing.assert_array_equal(got, decoded[leaf][layer])
            assert tensors.read(f"{stem}_input_scale").shape == ()


# --- MXFP4 --------------------------------------------------------------------------------


def test_transformers_dequantizes_gpt_oss_mxfp4_to_the_rollouts_weights(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config, tensors, decoded = export("gpt_oss", "mxfp4", tmp_path)
    for layer in range(config.num_layers):
        for leaf, name in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = (as_torch(tensors.read(f"{stem}_{n}")) for n in ("blocks", "scales"))
            got = convert_moe_packed_tensors(blocks, scales).float().numpy()  # [E, inputs, outputs]
            if leaf == "gate_up":
                got = np.concatenate([got[..., 0::2], got[..., 1::2]], axis=-1)
            wanted = decoded[leaf][layer].astype(np.float32)
            np.testing.assert_array_equal(np.swapaxes(got, 1, 2), wanted)


@torch.no_grad()
def test_transformers_runs_a_gpt_oss_mxfp4_export(tmp_path):
    config, params = golden_files.checkpoint("gpt_oss", "float32")
    out = trace_jax.save_checkpoint(tmp_path / "out", config, params, "mxfp4")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    tokens = golden_files.expected("gpt_oss")["tokens"]
    theirs = model.eval()(torch.from_numpy(tokens).long()).logits.numpy()
    policy = fp4.PrecisionPolicy((fp4.Rule("expert_weight", "mxfp4"),))
    ours = np.asarray(trace_jax.forward(config, params, tokens, policy).logits)
    assert np.abs(ours - theirs).max() < 1e-4 * theirs.std()


# --- GGUF and tokenizers ---------------------------------------------------------------------


@torch.no_grad()
def test_smollm2_computes_what_transformers_computes_from_the_same_file():
    path = chat_checkpoints.smollm2()
    load = dict(gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, **load
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **load)
    text = "A lighthouse keeper counts 1, 2, 3 waves; the fourth one never came. Größe: 12 m²"
    tokens = np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32)
    theirs = model.eval()(torch.from_numpy(tokens[None]).long()).logits.numpy()
    config, params = trace_jax.load_checkpoint(path, "float32")
    ours = np.asarray(trace_jax.forward(config, params, tokens[None]).logits)
    assert np.abs(ours - theirs).max() < 1e-4 * theirs.std()


def test_transformers_reads_exported_tokenizers_as_we_do(tmp_path):
    for name, text in chat_checkpoints.files().items():
        (tmp_path / name).write_text(text)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = chat_checkpoints.tokenizer()
    turns = [{"role": "user", "content": "añ 😀"}]
    text = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == ours.chat(turns)
    assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)
    assert theirs.eos_token_id == ours.eos_ids[0] and theirs.pad_token_id == ours.pad_id
