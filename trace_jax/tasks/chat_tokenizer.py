"""Tokenizers of real checkpoints: BPE, chat template, every EOS, streaming decode."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2.sandbox
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from trace_jax.tasks.tokenizer import ByteTokenizer

# The split before BPE, by GGUF's tokenizer.ggml.pre.
GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
SPLITS = {
    "gpt-2": lambda: GPT2_SPLIT,
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), GPT2_SPLIT]
    ),
    "qwen2": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
                    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
CONTROL = 3  # GGUF's token type of special tokens


class ChatTokenizer:
    """A checkpoint's tokenizer.

    Attributes:
      eos_ids: every id that ends a turn (generation_config.json may list several).
      pad_id, bos_id: as the checkpoint states them; pad_id falls back to the first EOS.
    """

    def __init__(
        self,
        core: Tokenizer,
        eos_ids: tuple[int, ...],
        template: str | None,
        bos_id: int | None = None,
        pad_id: int | None = None,
    ):
        if not eos_ids:
            raise ValueError("the checkpoint states no EOS token id")
        self._core, self.eos_ids, self._template = core, eos_ids, template
        self.bos_id, self.pad_id = bos_id, eos_ids[0] if pad_id is None else pad_id
        self.vocab_size = core.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; the names of special tokens in it become those tokens."""
        return self._core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of all `ids` in one decode, without special tokens."""
        return self._core.decode([int(i) for i in ids], skip_special_tokens=True)

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model's template words it.

        Raises:
          ValueError: the checkpoint has no template, or the template refuses.
        """
        if self._template is None:
            raise ValueError("the checkpoint has no chat template; write a plain prompt")
        name = lambda i: self._core.id_to_token(i) if i is not None else ""
        return self._compiled.render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=name(self.bos_id),
            eos_token=name(self.eos_ids[0]),
        )

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        def refuse(message):
            raise ValueError(f"chat template: {message}")

        # Sandboxed: a template comes with the checkpoint and is code.
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.globals["raise_exception"] = refuse
        # Some templates (GPT-OSS) state the day.
        env.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
        return env.from_string(self._template)

    def prompt_ids(self, text: str) -> list[int]:
        """A user's turn through the chat template, up to where the model's turn begins.

        Without a template, `text` as the tokenizer opens one (with BOS, if it adds that).
        """
        if self._template is None:
            return self._core.encode(text).ids
        return self.encode(self.chat([{"role": "user", "content": text}]))

    def turn_ids(self, text: str) -> list[int]:
        """The user's next turn, from behind the model's EOS to where its turn begins again.

        Cut out of a whole conversation, for templates word turns in the midst of others.

        Raises:
          ValueError: a template in which that place cannot be found.
        """
        if self._template is None:
            return self.encode("\n" + text)
        said = "\N{REPLACEMENT CHARACTER}"  # any text that no template has
        turns = [("user", "a"), ("assistant", said), ("user", text)]
        whole = self.chat([{"role": r, "content": c} for r, c in turns])
        _, found, rest = whole.partition(said)
        ends = [self._core.id_to_token(i) for i in self.eos_ids]
        end = next((e for e in ends if found and rest.lstrip().startswith(e)), None)
        if end is None:
            raise ValueError("the chat template does not end the model's turn with an EOS token")
        return self.encode(rest.lstrip().removeprefix(end))

    def files(self) -> dict[str, str]:
        """{name: text} of the files that a checkpoint folder holds for this tokenizer."""
        text = lambda value: json.dumps(value, indent=2) + "\n"
        ids = {"eos_token_id": list(self.eos_ids), "pad_token_id": self.pad_id}
        name = self._core.id_to_token
        names = {"eos_token": name(self.eos_ids[0]), "pad_token": name(self.pad_id)}
        if self.bos_id is not None:
            ids["bos_token_id"], names["bos_token"] = self.bos_id, name(self.bos_id)
        out = {
            "tokenizer.json": self._core.to_str(),
            "generation_config.json": text(ids),
            "tokenizer_config.json": text({"tokenizer_class": "PreTrainedTokenizerFast", **names}),
        }
        return out | ({"chat_template.jinja": self._template} if self._template else {})


class StreamDecoder:
    """Text of a growing sequence, never cutting a character of several bytes."""

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._shown = 0  # the window decoded, and its part already out

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._ids.append(int(token))
        text = self._tokenizer.decode(self._ids[self._start :])
        if text.endswith("\ufffd"):
            return ""
        return self._emit(text)

    def finish(self) -> str:
        """What is left, invalid bytes as U+FFFD."""
        return self._emit(self._tokenizer.decode(self._ids[self._start :]))

    def _emit(self, text: str) -> str:
        known = self._tokenizer.decode(self._ids[self._start : self._shown])
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(known) :]


def tokenizer_from_folder(folder: str | Path) -> ChatTokenizer:
    """Reads tokenizer.json, the chat template, and all EOS ids.

    Raises:
      ValueError: no tokenizer.json, or no EOS id in generation_config.json or config.json.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json")

    def read(name: str) -> dict[str, Any]:
        path = folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    ids = read("config.json") | read("generation_config.json")
    eos = ids.get("eos_token_id")
    eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else None
    return ChatTokenizer(
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        eos,
        text or read("tokenizer_config.json").get("chat_template"),
        ids.get("bos_token_id"),
        ids.get("pad_token_id"),
    )


def tokenizer_from_gguf(field) -> ChatTokenizer:
    """From a GGUF file's metadata; `field(name, default)` reads it (see GgufFile.field).

    Raises:
      ValueError: not a byte-level BPE with a known split.
    """
    kind, split = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or split not in SPLITS:
        raise ValueError(f"GGUF tokenizer {kind!r} with split {split!r} is not supported")
    names, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type", [])
    merges = [tuple(m.split(" ", 1)) for m in field("tokenizer.ggml.merges")]
    core = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=merges))
    core.pre_tokenizer, core.decoder = SPLITS[split](), decoders.ByteLevel()
    special = [n for n, t in zip(names, types, strict=False) if t == CONTROL]
    core.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in special])
    return ChatTokenizer(
        core,
        (field("tokenizer.ggml.eos_token_id"),),
        field("tokenizer.chat_template"),
        field("tokenizer.ggml.bos_token_id"),
        field("tokenizer.ggml.padding_token_id"),
    )


def byte_level() -> ChatTokenizer:
    """`ByteTokenizer` as files can hold it: the same ids, and a template that adds only BOS."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(0x100, 0x200))  # the others are shown as characters beyond Latin-1
    names = [chr(b) if b in kept else chr(next(moved)) for b in range(256)]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(n, special=True) for n in ("<pad>", "<bos>", "<eos>")])
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ids = ByteTokenizer
    return ChatTokenizer(core, ids.eos_ids, template, ids.bos_id, ids.pad_id)
