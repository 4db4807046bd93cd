"""Tokenizers: byte-safe streaming, templates, all EOS ids; SmolLM2 where its package is."""

import json
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from chat_checkpoints import smollm2
from safetensors.numpy import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import trace_jax
from trace_jax.model.gguf_io import GgufFile
from trace_jax.tasks.chat_tokenizer import (
    ChatTokenizer,
    StreamDecoder,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)

GOLDEN = Path(__file__).parent / "golden" / "smollm2.safetensors"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@cache
def byte_bpe() -> ChatTokenizer:
    """Every byte is a token: characters of several bytes always span several."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(n, special=True) for n in ("<s>", "</s>", "<end>")])
    return ChatTokenizer(core, (257, 258), TEMPLATE, bos_id=256)


def test_streaming_never_cuts_a_character():
    """BR-160."""
    tokenizer, text = byte_bpe(), "añ 😀!"
    decoder = StreamDecoder(tokenizer)
    parts = [decoder.push(i) for i in tokenizer.encode(text)]
    assert "".join(parts) + decoder.finish() == text
    assert len(parts) == len(text.encode()) and parts.count("😀") == 1
    assert not any("\ufffd" in part for part in parts)


def test_a_character_in_two_tokens_is_whole_in_one_decode():
    """BR-160: bytes 240, 159, 152 | 128; decoded token by token they are four U+FFFD."""
    tokenizer = byte_bpe()
    ids = tokenizer.encode("😀")
    assert len(ids) == 4 and tokenizer.decode(ids) == "😀"
    assert "".join(tokenizer.decode([i]) for i in ids) == "\ufffd" * 4
    assert tokenizer.decode([*ids[:3], 258]) != "😀"


def test_invalid_bytes_are_shown_not_raised():
    tokenizer = byte_bpe()
    ids = tokenizer.encode("😀")[:2] + tokenizer.encode("ok")
    decoder = StreamDecoder(tokenizer)
    shown = "".join(decoder.push(i) for i in ids) + decoder.finish()
    assert shown == tokenizer.decode(ids) and shown.endswith("ok") and "\ufffd" in shown


def test_chat_template_and_special_tokens():
    tokenizer = byte_bpe()
    text = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert text == "<s>user: hi</s>\n<s>assistant: "
    ids = tokenizer.encode(text)
    assert ids.count(256) == 2 and ids.count(257) == 1
    assert tokenizer.decode(ids) == "user: hi\nassistant: "


def test_a_template_runs_in_a_sandbox():
    tokenizer = ChatTokenizer(byte_bpe()._core, (257,), "{{ messages.__class__.__mro__ }}")
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.chat([])


def test_all_eos_ids_are_kept(tmp_path):
    """BR-043; written and read back."""
    for name, text in byte_bpe().files().items():
        (tmp_path / name).write_text(text)
    again = tokenizer_from_folder(tmp_path)
    assert again.eos_ids == (257, 258)
    assert again.encode("<s>añ") == byte_bpe().encode("<s>añ")
    assert again.chat([]) == "<s>assistant: "
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert tokenizer_from_folder(tmp_path).eos_ids == (7,)
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="EOS"):
        tokenizer_from_folder(tmp_path)


def test_smollm2_tokens_are_those_of_transformers():
    golden = load_file(GOLDEN)
    tokenizer = tokenizer_from_gguf(GgufFile(smollm2()).field)
    text = "Hello, wörld! It's 1,234.5 °C 😀\n\n  def f(x):\n\treturn x**2  # naïve"
    assert tokenizer.encode(text) == golden["text"].tolist()
    assert tokenizer.decode(golden["text"]) == text
    chat = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert tokenizer.encode(chat) == golden["chat"].tolist()
    assert 2 in tokenizer.eos_ids


def test_smollm2_logits_are_those_of_transformers():
    golden, path = load_file(GOLDEN), smollm2()
    config, params = trace_jax.load_checkpoint(path, "float32")
    assert sum(a.size for a in jax.tree.leaves(params)) == 134_515_008
    logits = np.asarray(trace_jax.forward(config, params, golden["chat"][None]).logits[0])
    error = np.abs(logits[:, :64] - golden["logits"]).max() / golden["std"][0]
    assert error < 1e-4
    np.testing.assert_array_equal(logits.argmax(-1), golden["argmax"])
