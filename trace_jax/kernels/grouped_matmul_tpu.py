"""Grouped products on TPU, where no tile of rows needs a copy of its expert's weight.

Products with the weights are XLA's own ragged ones. The gradient of the weights, for which XLA
multiplies all rows by every expert, is a kernel: the tiles of an expert follow each other, and
their products are summed in the block of the result that stays in fast memory meanwhile.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = (512, 1024)  # of a gradient [N, K] at once, in FP32: 2 MiB


def rows_product(x: jax.Array, weight: jax.Array, tile_expert: jax.Array, axis: int) -> jax.Array:
    """FP32 rows x [rows, .] times weight [experts, N, K] of their tile's expert, over `axis`."""
    tiles = jnp.zeros(weight.shape[0], jnp.int32).at[tile_expert].add(1)
    rows = tiles * (x.shape[0] // tile_expert.shape[0])
    dims = jax.lax.RaggedDotDimensionNumbers((((1,), (axis,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, weight, rows, dims, preferred_element_type=jnp.float32)


def _kernel(expert_ref, g_ref, x_ref, out_ref):
    tile = pl.program_id(2)
    part = jax.lax.dot_general(
        g_ref[...], x_ref[...], (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    first = (tile == 0) | (expert_ref[tile] != expert_ref[jnp.maximum(tile - 1, 0)])

    @pl.when(first)
    def _():
        out_ref[0] = part

    @pl.when(jnp.logical_not(first))
    def _():
        out_ref[0] += part


def weight_gradient(
    g: jax.Array, x: jax.Array, tile_expert: jax.Array, experts: int, interpret: bool = False
) -> jax.Array:
    """FP32 [experts, N, K]: the sum of g^T x over the rows of each expert.

    g [rows, N], x [rows, K]; tile_expert int32 [tiles], ascending.
    """
    (rows, n), k, tiles = g.shape, x.shape[1], tile_expert.shape[0]
    block_n, block_k = min(BLOCK[0], n), min(BLOCK[1], k)
    spread = lambda g: jnp.full((experts, n, k), g[0, 0], jnp.float32)
    out = pl.pallas_call(
        _kernel,
        out_shape=jax.eval_shape(spread, g),  # which varies over a mesh as g does
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(n, block_n), pl.cdiv(k, block_k), tiles),
            in_specs=[
                pl.BlockSpec((rows // tiles, block_n), lambda i, j, t, expert: (t, i)),
                pl.BlockSpec((rows // tiles, block_k), lambda i, j, t, expert: (t, j)),
            ],
            out_specs=pl.BlockSpec(
                (1, block_n, block_k), lambda i, j, t, expert: (expert[t], i, j)
            ),
        ),
        interpret=interpret,
    )(tile_expert, g, x)
    served = jnp.zeros(experts, bool).at[tile_expert].set(True)
    return jnp.where(served[:, None, None], out, 0.0)  # nothing was written for the others
