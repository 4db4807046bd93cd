"""Products of token rows with the weights of the experts they were routed to.

Rows are laid out expert by expert, each expert's share padded to whole tiles, so
that every tile of rows belongs to one expert. Shapes depend on the number of rows
and experts alone: nothing is dropped and nothing recompiles when the load moves.

Moving between tokens and rows is a permutation, so its transpose is a gather too;
saying so (`custom_vjp`) keeps scatters out of the backward pass.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.kernels import dispatch, grouped_matmul_tpu


class Groups(NamedTuple):
    """Layout of routed rows; a slot is one of the top_k choices of a token.

    Attributes:
      row: int32 [tokens, top_k]; where each slot stands among the rows.
      slot: int32 [rows]; token * top_k + slot of each row, or tokens * top_k for a
        padding row.
      tile_expert: int32 [tiles]; the expert of each tile.
      sizes: int32 [experts]; rows of each expert, padding not counted.
    """

    row: jax.Array
    slot: jax.Array
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
    flat = expert_ids.reshape(-1)
    tile = tile_rows(flat.size, num_experts)
    tiles = (flat.size + num_experts * (tile - 1)) // tile
    sizes = jnp.zeros(num_experts, jnp.int32).at[flat].add(1)
    tile_ends = jnp.cumsum(-(-sizes // tile))
    first_row = tile * (tile_ends - -(-sizes // tile))
    order = jnp.argsort(flat, stable=True)
    rank_sorted = jnp.arange(flat.size) - (jnp.cumsum(sizes) - sizes)[flat[order]]
    row = jnp.zeros(flat.size, jnp.int32).at[order].set(first_row[flat[order]] + rank_sorted)
    slot = jnp.full(tiles * tile, flat.size, jnp.int32).at[row].set(jnp.arange(flat.size))
    tile_expert = jnp.searchsorted(tile_ends, jnp.arange(tiles), side="right")
    tile_expert = jnp.minimum(tile_expert, num_experts - 1).astype(jnp.int32)
    return Groups(row.reshape(expert_ids.shape), slot, tile_expert, sizes)


def _int_zeros(groups: Groups):
    return jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), groups)


@jax.custom_vjp
def slots_to_rows(x: jax.Array, groups: Groups) -> jax.Array:
    """x [tokens, top_k, ...] to [rows, ...]; padding rows are zero."""
    flat = x.reshape(-1, *x.shape[2:])
    return flat.at[groups.slot].get(mode="fill", fill_value=0)


@jax.custom_vjp
def rows_to_slots(rows: jax.Array, groups: Groups) -> jax.Array:
    """rows [rows, ...] back to [tokens, top_k, ...]."""
    return rows[groups.row]


@jax.custom_vjp
def tokens_to_rows(x: jax.Array, groups: Groups) -> jax.Array:
    """x [tokens, ...] to [rows, ...], once for every slot; padding rows are zero."""
    return x.at[groups.slot // groups.row.shape[1]].get(mode="fill", fill_value=0)


slots_to_rows.defvjp(
    lambda x, groups: (slots_to_rows(x, groups), groups),
    lambda groups, g: (rows_to_slots(g, groups), _int_zeros(groups)),
)
rows_to_slots.defvjp(
    lambda rows, groups: (rows_to_slots(rows, groups), groups),
    lambda groups, g: (slots_to_rows(g, groups), _int_zeros(groups)),
)
tokens_to_rows.defvjp(
    lambda x, groups: (tokens_to_rows(x, groups), groups),
    lambda groups, g: (jnp.sum(rows_to_slots(g, groups), axis=1), _int_zeros(groups)),
)


def _product(dtype):
    """Einsum with FP32 sums; FP32 operands keep all their bits on accelerators too."""
    highest = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return partial(jnp.einsum, preferred_element_type=jnp.float32, precision=highest)


def _rows_by_tile(x, weight, tile_expert, axis: int):
    """FP32 rows x [rows, .] times weight [experts, N, K] of their tile's expert, over `axis`."""
    spec = {1: "tmn,tnk->tmk", 2: "tmk,tnk->tmn"}[axis]
    tiles = x.reshape(tile_expert.shape[0], -1, x.shape[-1])
    out = _product(x.dtype)(spec, tiles, weight[tile_expert])
    return out.reshape(x.shape[0], -1)


def _gradient_by_tile(g, x, tile_expert, experts: int):
    """FP32 [experts, N, K]: the sum of g^T x over the rows of each expert."""
    g, x = (a.reshape(tile_expert.shape[0], -1, a.shape[-1]) for a in (g, x))
    by_tile = _product(x.dtype)("tmn,tmk->tnk", g, x)
    # A product with the one-hot map instead of a scatter, which is slow on CPU.
    owner = jax.nn.one_hot(tile_expert, experts, dtype=jnp.float32, axis=0)
    return jnp.einsum("et,tnk->enk", owner, by_tile, precision=jax.lax.Precision.HIGHEST)


# Products of rows with weights, and weights' gradients.
VERSIONS = {
    "reference": (_rows_by_tile, _gradient_by_tile),
    "tpu": (grouped_matmul_tpu.rows_product, grouped_matmul_tpu.weight_gradient),
}


def tpu_refusal(x: jax.Array, tile: int) -> str | None:
    """Why TPU's products cannot take rows x [rows, K] in tiles of `tile`; None if they can."""
    if dispatch.platform() != "tpu":
        return f"it runs on TPU, not on {dispatch.platform()}"
    if x.dtype != jnp.bfloat16:
        return f"it takes BF16 rows, not {x.dtype}"
    return None if tile % 16 == 0 else f"it takes tiles of 16 rows or a multiple, not of {tile}"


def _version(x: jax.Array, tile_expert: jax.Array):
    tile = x.shape[0] // tile_expert.shape[0]
    refusals = {"reference": lambda: None, "tpu": lambda: tpu_refusal(x, tile)}
    return VERSIONS[dispatch.choose("grouped_matmul", "auto", refusals, {"tpu": ("tpu",)})]


@jax.custom_vjp
def grouped_matmul(x: jax.Array, weight: jax.Array, groups: Groups) -> jax.Array:
    """x [rows, K] times weight [experts, N, K] of each row's expert: FP32 [rows, N].

    Accumulates in FP32, gradients included; a gradient is returned in its operand's
    dtype. A weight held in FP32 is used in x's, so that only its gradient keeps all bits.
    Experts without rows get a zero gradient. On TPU no tile copies its expert's weight.
    """
    rows_product, _ = _version(x, groups.tile_expert)
    return rows_product(x, weight.astype(x.dtype), groups.tile_expert, 2)


def _backward(residual, g):
    x, weight, groups, held = residual
    rows_product, weight_gradient = _version(x, groups.tile_expert)
    g = g.astype(x.dtype)
    dx = rows_product(g, weight, groups.tile_expert, 1)
    dw = weight_gradient(g, x, groups.tile_expert, weight.shape[0])
    return dx.astype(x.dtype), dw.astype(held.dtype), _int_zeros(groups)


def _forward(x, weight, groups):
    held = jnp.zeros(0, weight.dtype)
    return grouped_matmul(x, weight, groups), (x, weight.astype(x.dtype), groups, held)


grouped_matmul.defvjp(_forward, _backward)
