"""The last tokens of each sequence, unquantized: what a `kv_window` keeps beside pages.

A ring of W tokens a sequence: token i is in slot i % W. Rings are {"k", "v"} of
[B, W, heads, width], or BF16 pages in the kernels' layout (kernels.kv_recent), whose decode
steps read and write them there.
"""

import jax
import jax.numpy as jnp

from trace_jax.fp4 import LayerPrecision
from trace_jax.kernels import kv_pages, kv_recent
from trace_jax.kernels.kv_pages import KVPages
from trace_jax.model.config import ModelConfig
from trace_jax.model.kv_planes import Rows

Rings = dict[str, jax.Array] | KVPages


def empty_rings(config: ModelConfig, precision: LayerPrecision, batch: int, kernel: bool) -> Rings:
    """Rings of one layer before any token; `kernel`: in the kernels' layout."""
    window = precision.kv_window
    if kernel:
        return kv_recent.new_recent(batch, window, config.num_kv_heads, config.head_dim)
    shapes = config.site_shapes()
    wide = lambda shape: jnp.zeros((batch, window, shape.rows, shape.width), config.dtype)
    return {site: wide(shapes[site]) for site in "kv"}


def by_position(rings: Rings, new: Rows, positions, valid, length: int) -> Rows:
    """The rings' tokens and new ones, each where it stands in its sequence.

    Args:
      rings: before the new tokens.
      new: {"k", "v"} [B, S, heads, width] of tokens at `positions` int32 [B, S], consecutive,
        where `valid` bool [B, S].

    Returns:
      {"recent_k", "recent_v"} [B, length, heads, width]; zeros elsewhere.
    """
    batch = jnp.arange(positions.shape[0])[:, None]
    held = _rows_of(rings, positions.shape[0])
    token = kv_recent.ring_tokens(positions[:, 0], held["k"].shape[1])
    token = jnp.where(token < 0, length, token)
    at = jnp.where(valid, positions, length)

    def spread(site):
        out = jnp.zeros((positions.shape[0], length, *new[site].shape[2:]), new[site].dtype)
        out = out.at[batch, token].set(held[site].astype(out.dtype), mode="drop")
        return out.at[batch, at].set(new[site], mode="drop")

    return {f"recent_{site}": spread(site) for site in "kv"}


def pushed(rings: Rings, new: Rows, positions, valid) -> Rings:
    """Rings after the new tokens; arguments as for `by_position`, valid tokens first."""
    batch = jnp.arange(positions.shape[0])[:, None]
    held = _rows_of(rings, positions.shape[0])
    window = held["k"].shape[1]
    end = positions[:, :1] + jnp.sum(valid, axis=1, keepdims=True)
    slot = jnp.where(valid & (positions >= end - window), positions % window, window)
    put = lambda site: held[site].at[batch, slot].set(new[site], mode="drop")
    rows = {site: put(site) for site in "kv"}
    if not isinstance(rings, KVPages):
        return rows
    pages = {site: x.reshape(-1, kv_pages.PAGE, *x.shape[2:]) for site, x in rows.items()}
    return kv_pages.write_pages(rings, jnp.arange(rings.data.shape[0]), **pages)


def _rows_of(rings: Rings, batch: int) -> Rows:
    if not isinstance(rings, KVPages):
        return rings
    pages = kv_pages.read_pages(rings, kv_recent.ring_table(rings, batch))
    rows = [x.swapaxes(2, 3).astype(jnp.bfloat16) for x in pages]
    k, v = (x.reshape(batch, -1, *x.shape[3:]) for x in rows)
    return {"k": k, "v": v}
