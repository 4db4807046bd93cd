"""Routed products on TPU: Pallas, FP4 weights, on every generation.

Layout: K runs along sublanes and outputs along lanes, two values of K a byte (see fp4_tpu). Where
nibbles are unpacked, the two are two products: x is split into its even and odd columns instead
of interleaving the weights.
Rows are laid out by expert in tiles of 16; consecutive tiles of one expert reuse its block.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trace_jax.kernels import fp4_tpu

TILE = 16  # rows: one BF16 sublane tile
_BLOCKS = (512, 256, 128)  # outputs a step, the largest that divides


def lay_out_nvfp4(packed: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes [experts, parts, N, K/2] and E5M3 scales [.., N, K/16] to K-major order."""
    return packed.swapaxes(-1, -2), scales.swapaxes(-1, -2)


def block_of(outputs: int) -> int | None:
    """Outputs a step, or None if no block divides them."""
    return next((b for b in _BLOCKS if outputs % b == 0), None)


def _product(x_ref, code_ref, scale_ref, part: int, float4: bool) -> jax.Array:
    scale = fp4_tpu.scale_values(scale_ref[0, part])
    values = fp4_tpu.decode(code_ref[0, part], scale, float4)
    out, size = 0.0, values[0].shape[0]
    for i, value in enumerate(values):
        x = x_ref[:, i * size : (i + 1) * size]
        # Code x scale is exact in BF16.
        out += jnp.dot(x, value.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    return out


def _kernel(
    expert_ref, used_ref, x_ref, code_ref, scale_ref, alpha_ref, out_ref, *, activate, float4
):  # fmt: skip
    @pl.when(pl.program_id(1) < used_ref[0])
    def _():
        product = functools.partial(_product, x_ref, code_ref, scale_ref, float4=float4)
        out = product(0) * alpha_ref[:, 0:1]
        if activate is not None:
            out = activate(out, product(1) * alpha_ref[:, 1:2])
        out_ref[...] = out.astype(out_ref.dtype)


def _tiles(offset: jax.Array, rows: int):
    """Expert of each tile, tiles in use, and each sorted row's place among the tiles."""
    experts = offset.shape[0] - 1
    count = -(-jnp.diff(offset) // TILE)
    ends = jnp.cumsum(count)
    tiles = rows // TILE + min(experts, rows)
    last = jnp.maximum(ends[-1] - 1, 0)
    tile = jnp.minimum(jnp.arange(tiles), last)  # unused tiles repeat the last: no new copy
    expert_of_tile = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
    expert = jnp.searchsorted(offset, jnp.arange(rows), side="right") - 1
    place = (ends - count)[expert] * TILE + jnp.arange(rows) - offset[expert]
    return expert_of_tile, ends[-1:].astype(jnp.int32), expert, place


def expert_matmul(
    x, codes, scales, outer, offset, x_outer, activate, interpret=False, float4=None
):  # fmt: skip
    """x BF16 [rows, K] in row order times the rows' experts: [rows, N] in row order.

    codes uint8 [experts, parts, K/2, N], scales E5M3 uint8 [.., K/16, N], outer FP32
    [experts, 2], x_outer FP32 [rows] or None. `activate(gate, up)` for two parts gives
    BF16; None, one part, gives FP32. `float4`: read the bytes as such; None: as the chip can.
    """
    rows, k = x.shape
    experts, parts, half, n = codes.shape
    tile_expert, used, expert, place = _tiles(offset, rows)
    tiles, block = tile_expert.shape[0], block_of(n)
    alpha = outer[expert] if x_outer is None else outer[expert] * x_outer[:, None]
    x = jnp.pad(x, [(0, 0), (0, 2 * half - k)])
    float4 = fp4_tpu.float4_here() if float4 is None else float4
    x = jnp.zeros((tiles * TILE, 2 * half), x.dtype).at[place].set(fp4_tpu.split(x, float4))
    alpha = jnp.zeros((tiles * TILE, 2), jnp.float32).at[place].set(alpha)
    weight = lambda j, i, e, u: (e[i], 0, 0, j)  # noqa: E731
    row = lambda j, i, e, u: (jnp.minimum(i, u[0]), 0)  # noqa: E731
    dtype = jnp.float32 if activate is None else jnp.bfloat16
    out = pl.pallas_call(
        functools.partial(_kernel, activate=activate, float4=float4),
        out_shape=jax.ShapeDtypeStruct((tiles * TILE, n), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(n // block, tiles),
            in_specs=[
                pl.BlockSpec((TILE, 2 * half), row),
                pl.BlockSpec((1, parts, half, block), weight),
                pl.BlockSpec((1, parts, half // 8, block), weight),
                pl.BlockSpec((TILE, 2), row),
            ],
            out_specs=pl.BlockSpec((TILE, block), lambda j, i, e, u: (i, j)),
        ),
        interpret=interpret,
    )(tile_expert, used, x, codes, scales, alpha)
    return out[place]
