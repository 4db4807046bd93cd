"""Products of token rows with the weights of the experts they were routed to.

Rows are laid out expert by expert, each expert's share padded to whole tiles, so
that every tile of rows belongs to one expert. Shapes depend on the number of rows
and experts alone: nothing is dropped and nothing recompiles when the load moves.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Groups(NamedTuple):
    """Layout of routed rows.

    Attributes:
      row: int32 [tokens * top_k]; where (token, slot) stands among the rows.
      token: int32 [rows]; the token of each row, or `tokens` for a padding row.
      tile_expert: int32 [tiles]; the expert of each tile.
      sizes: int32 [experts]; rows of each expert, padding not counted.
    """

    row: jax.Array
    token: jax.Array
    tile_expert: jax.Array
    sizes: jax.Array


def tile_rows(rows: int, num_experts: int) -> int:
    """Rows a tile: a power of two near half an expert's average share, 8 to 256."""
    share = max(rows // (2 * num_experts), 1)
    return min(max(1 << (share.bit_length() - 1), 8), 256)


def group_tokens(expert_ids: jax.Array, num_experts: int) -> Groups:
    """Lays out tokens by expert, dropless.

    Args:
      expert_ids: int32 [tokens, top_k], each in 0..num_experts-1.
    """
    tokens, top_k = expert_ids.shape
    flat = expert_ids.reshape(-1)
    tile = tile_rows(flat.size, num_experts)
    tiles = (flat.size + num_experts * (tile - 1)) // tile
    sizes = jnp.zeros(num_experts, jnp.int32).at[flat].add(1)
    tile_ends = jnp.cumsum(-(-sizes // tile))
    first_row = tile * (tile_ends - -(-sizes // tile))
    order = jnp.argsort(flat, stable=True)
    rank_sorted = jnp.arange(flat.size) - (jnp.cumsum(sizes) - sizes)[flat[order]]
    row = jnp.zeros(flat.size, jnp.int32).at[order].set(first_row[flat[order]] + rank_sorted)
    token = jnp.full(tiles * tile, tokens, jnp.int32).at[row].set(jnp.arange(flat.size) // top_k)
    tile_expert = jnp.searchsorted(tile_ends, jnp.arange(tiles), side="right")
    tile_expert = jnp.minimum(tile_expert, num_experts - 1).astype(jnp.int32)
    return Groups(row, token, tile_expert, sizes)


def grouped_matmul(x: jax.Array, weight: jax.Array, groups: Groups) -> jax.Array:
    """x [rows, K] times weight [experts, N, K] of each row's expert: FP32 [rows, N].

    Accumulates in FP32. Padding rows are whatever x holds there (gathered as
    zeros by `gather_rows`).
    """
    tiles = groups.tile_expert.shape[0]
    out = jnp.einsum(
        "tmk,tnk->tmn",
        x.reshape(tiles, -1, x.shape[-1]),
        weight[groups.tile_expert],
        preferred_element_type=jnp.float32,
    )
    return out.reshape(x.shape[0], -1)


def gather_rows(x: jax.Array, groups: Groups) -> jax.Array:
    """x [tokens, ...] to rows; padding rows are zero."""
    return x.at[groups.token].get(mode="fill", fill_value=0)


def slot_to_rows(x: jax.Array, groups: Groups) -> jax.Array:
    """x [tokens * top_k, ...] (one value a slot) to rows; padding rows are zero."""
    shape = (groups.token.shape[0], *x.shape[1:])
    return jnp.zeros(shape, x.dtype).at[groups.row].set(x)
