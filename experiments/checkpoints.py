"""What the checkpoint commands share: one way to name a checkpoint."""

from pathlib import Path

from trace_jax.model.gguf_io import GgufFile, packaged_gguf
from trace_jax.tasks.chat_tokenizer import (
    ChatTokenizer,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)


def checkpoint_path(name: str) -> Path:
    """A folder, a GGUF file, or pip:PACKAGE for the GGUF file inside an installed package."""
    return packaged_gguf(name.removeprefix("pip:")) if name.startswith("pip:") else Path(name)


def tokenizer_of(path: Path) -> ChatTokenizer:
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(GgufFile(path).field)
    return tokenizer_from_folder(path)
