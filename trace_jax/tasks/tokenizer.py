"""A byte tokenizer: needs no files, and every text has exactly one encoding."""

from __future__ import annotations

from collections.abc import Iterable


class ByteTokenizer:
    """Ids 0..255 are bytes of UTF-8; PAD, BOS and EOS follow.

    `eos_ids` is a tuple because real chat models end a turn with any of several ids.
    """

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
