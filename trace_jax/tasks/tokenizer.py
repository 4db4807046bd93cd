"""What a tokenizer must do, and one of bytes: no files, and every text has one encoding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Tokenizer(Protocol):
    """Of a run: `ByteTokenizer`, or the checkpoint's own (`chat_tokenizer.ChatTokenizer`).

    Attributes:
      pad_id: fills rows; never read.
      eos_ids: every id that ends a turn; real chat models have several. The first ends the
        answers of the warm start.
    """

    pad_id: int
    eos_ids: tuple[int, ...]
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def prompt_ids(self, text: str) -> list[int]:
        """A conversation that opens with `text`, up to where the model's turn begins."""
        ...

    def turn_ids(self, text: str) -> list[int]:
        """What follows the EOS of the model's turn when `text` is said to it next."""
        ...


class ByteTokenizer:
    """Ids 0..255 are bytes of UTF-8; PAD, BOS and EOS follow."""

    pad_id: int = 256
    bos_id: int = 257
    eos_id: int = 258
    eos_ids: tuple[int, ...] = (258,)
    vocab_size: int = 259

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of `text`, without BOS or EOS."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of all `ids` in one decode; special ids are dropped.

        Decoding token by token would break characters of several bytes. Invalid UTF-8, which an
        untrained model emits freely, becomes U+FFFD.
        """
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")

    def prompt_ids(self, text: str) -> list[int]:
        """BOS and the text: there is no template."""
        return [self.bos_id, *self.encode(text)]

    def turn_ids(self, text: str) -> list[int]:
        return self.encode("\n" + text)
