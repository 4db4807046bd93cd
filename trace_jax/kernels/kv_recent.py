"""The most recent tokens of each sequence in BF16, beside pages that hold them all.

A window of W tokens (a multiple of 64) is a ring: token i of sequence b is token i % W of the
BF16 pages b * W / 64 and following. Every token goes to the quantized pages as well, when it
comes, so leaving the window moves nothing; attention reads the last W tokens here.
"""

import jax
import jax.numpy as jnp

from trace_jax.kernels.kv_append import append
from trace_jax.kernels.kv_pages import KVPages, new_pages, read_pages
from trace_jax.kernels.kv_units import PAGE


def new_recent(
    batch: int, tokens: int, kv_heads: int, head_size: int, layout: str = "auto"
) -> KVPages:
    """Empty windows of `tokens` for `batch` sequences; ValueError if not a multiple of 64."""
    if tokens < 1 or tokens % PAGE:
        raise ValueError(f"recent tokens: {tokens}; write a positive multiple of {PAGE}")
    return new_pages(batch * tokens // PAGE, kv_heads, head_size, "bf16", layout)


def ring_table(recent: KVPages, batch: int) -> jax.Array:
    """int32 [batch, W / 64]: the pages of each sequence's window."""
    return jnp.arange(recent.data.shape[0], dtype=jnp.int32).reshape(batch, -1)


def append_recent(
    recent: KVPages, positions: jax.Array, k: jax.Array, v: jax.Array, version: str = "auto"
) -> KVPages:
    """Stores one token a sequence over the one that leaves; arguments as for `append`."""
    table = ring_table(recent, positions.shape[0])
    at = jnp.where(positions < 0, -1, positions % (table.shape[1] * PAGE))
    return append(recent, table, at, k, v, version=version).pages


def read_recent(recent: KVPages, lengths: jax.Array):
    """K and V, FP32 [batch, kv_heads, W, D], and which token each is, int32 [batch, W].

    A slot that holds none of a sequence's `lengths` tokens has a negative number.
    """
    batch = lengths.shape[0]
    k, v = read_pages(recent, ring_table(recent, batch))
    k, v = (x.swapaxes(1, 2).reshape(batch, recent.kv_heads, -1, x.shape[-1]) for x in (k, v))
    return k, v, ring_tokens(lengths, k.shape[2])


def ring_tokens(lengths: jax.Array, window: int) -> jax.Array:
    """int32 [batch, window]: the token in each slot of a ring; negative where there is none."""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(window, dtype=jnp.int32)[None]) % window
