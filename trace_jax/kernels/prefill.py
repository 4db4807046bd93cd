"""Routed products of many rows on Hopper: weights to BF16 scratch, then a product of BF16.

The version "prefill" of `expert_matmul`, which holds the contract: same weights, same arguments.
Decoding weights while they stream pays as long as they are read a few times; where an expert has
many rows the tensor cores are the limit, and they want BF16 operands in shared memory. See
cuda/prefill.cu. Scratch is bounded: where the weights would not fit, experts are unpacked group by
group.
"""

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.kernels import cuda_build
from trace_jax.kernels.expert_layout import ExpertWeights

SCRATCH_BYTES = 2**30
_TILES = 16  # of 16 outputs, that are one of the product's
_BLOCK_BYTES = 2**15  # of scratch: 256 outputs x 64 of K
# From which on "auto" takes it. On an H200 decoding in flight won with 256 rows an expert; that
# unpacking wins with 1,024 is drawn out from times at 256 and 2,048 (benchmarks/kernels_log.md).
ROWS_PER_EXPERT, ROWS = 1024, 8192


def pays(rows: int, experts: int) -> bool:
    """Whether so many routed rows are multiplied this way; a static choice."""
    return rows >= max(ROWS_PER_EXPERT * experts, ROWS)


def scratch_shape(weights: ExpertWeights, limit: int) -> tuple[int, int]:
    """Experts of a group and bytes of each, so that a group keeps within `limit` bytes."""
    experts, tiles, chunks, _ = weights.data.shape
    return _group(experts, tiles, chunks, limit)


def _group(experts: int, tiles: int, chunks: int, limit: int) -> tuple[int, int]:
    size = -(-tiles // _TILES) * chunks * _BLOCK_BYTES
    groups = -(-experts // max(limit // size, 1))
    return -(-experts // groups), size


def scratch_bytes(rows: int, experts: int, hidden: int, inner: int) -> int:
    """Scratch of a layer of so many routed rows under "auto"; 0 where weights decode in flight.

    The two products take turns: what counts is the larger one's.
    """
    if not experts or not pays(rows, experts):
        return 0
    shapes = ((2 * inner, hidden), (hidden, inner))  # outputs, inputs
    groups = (_group(experts, -(-n // 16), -(-k // 64), SCRATCH_BYTES) for n, k in shapes)
    return max(count * size for count, size in groups)


def expert_matmul(x, weights, routing, x_outer, epilogue: int, limit: int = SCRATCH_BYTES):
    """The contract of expert_matmul.expert_matmul; weights in the layout "hopper"."""
    rows = routing.slot.shape[0]
    dtype = jnp.bfloat16 if weights.gated else jnp.float32
    out = (
        jax.ShapeDtypeStruct((rows, weights.outputs), dtype),
        jax.ShapeDtypeStruct(scratch_shape(weights, limit), jnp.uint8),
    )
    none = jnp.zeros(0, jnp.float32)
    call = jax.ffi.ffi_call(cuda_build.register("prefill"), out)
    return call(
        weights.data, weights.outer, none if weights.bias is None else weights.bias.reshape(-1), x,
        none if x_outer is None else x_outer.reshape(-1), routing.slot, routing.offset,
        epilogue=np.int64(epilogue), top_k=np.int64(rows // x.shape[0]), fp4=weights.quantized,
    )[0]  # fmt: skip
