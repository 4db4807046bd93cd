"""A checkpoint as the start of a run: its tokenizer, its parameters, the files beside them."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from trace_jax import fp4
from trace_jax.config import Config, require
from trace_jax.fp4 import QTensor
from trace_jax.model.checkpoint_export import companions
from trace_jax.model.checkpoint_io import checkpoint_path, load_checkpoint
from trace_jax.model.gguf_io import GgufFile
from trace_jax.tasks import ByteTokenizer
from trace_jax.tasks.chat_tokenizer import (
    ChatTokenizer,
    byte_level,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)
from trace_jax.tasks.tokenizer import Tokenizer

GENERATION = "generation_config.json"


def tokenizer_of(name: str | Path) -> ChatTokenizer:
    """The tokenizer of a checkpoint: folder, .gguf file or pip:PACKAGE."""
    path = checkpoint_path(name)
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(GgufFile(path).field)
    return tokenizer_from_folder(path)


def run_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of init.checkpoint, else bytes.

    Raises:
      ValueError: it has ids that the model lacks.
    """
    if not config.init.checkpoint:
        return ByteTokenizer()
    tokenizer = tokenizer_of(config.init.checkpoint)
    require(
        tokenizer.vocab_size <= config.model.vocab_size,
        f"init.checkpoint {config.init.checkpoint}: its tokenizer has {tokenizer.vocab_size} ids "
        f"and its model {config.model.vocab_size}; write one whose files belong together",
    )
    return tokenizer


def run_params(config: Config, mesh) -> dict:
    """Parameters of init.checkpoint as FP32 masters, each read to its place on the mesh.

    FP4 weights are decoded: quantized again, they give the same values.
    """
    found, params = load_checkpoint(config.init.checkpoint, "float32", mesh=mesh)
    require(
        dataclasses.replace(found, dtype=config.model.dtype) == config.model,
        f"model is not that of init.checkpoint {config.init.checkpoint}; leave model.* out",
    )
    quantized = lambda a: isinstance(a, QTensor)
    decode = jax.jit(lambda a: fp4.dequantize(a, jnp.float32))
    return jax.tree.map(lambda a: decode(a) if quantized(a) else a, params, is_leaf=quantized)


def export_files(name: str | Path) -> dict[str, str]:
    """{name: text} of the tokenizer and generation files of a checkpoint; of byte tokens for "".

    All EOS ids are in generation_config.json, wherever the checkpoint states them.
    """
    if not name:
        return byte_level().files()
    path = checkpoint_path(name)
    made = tokenizer_of(path).files()
    own = companions(path) if path.is_dir() else {}
    both = [json.loads(f.get(GENERATION, "{}")) for f in (made, own)]
    return made | own | {GENERATION: json.dumps(both[0] | both[1], indent=2) + "\n"}
