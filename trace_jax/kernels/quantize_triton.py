"""The one-pass quantizer in Triton, for NVIDIA GPUs from Ampere on; rows of BF16."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from trace_jax.kernels import fp4_triton, triton_call

_VALUES = 4096  # a block of threads takes, at least one row


@triton.jit
def quantize(
    x, packed, scales, outer, bits, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of WIDTH values, a multiple of 16; PADDED is a power of two."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = row.to(tl.int64)[:, None]
    column, here = tl.arange(0, PADDED)[None, :], row < COUNT
    inside = here & (column < WIDTH)
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    exponent = fp4_triton.row_exponent(tl.max(fp4_triton.magnitude_bits(value), 1, keep_dims=True))
    blocks = tl.reshape(value, (ROWS, PADDED // 16, 16))
    code, scale = fp4_triton.encode_blocks(blocks, exponent[:, :, None])
    code = tl.reshape(code, (ROWS, PADDED))
    column = tl.arange(0, PADDED // 2)[None, :]
    inside = here & (column < WIDTH // 2)
    both = fp4_triton.packed(code, ROWS, PADDED, 4)
    tl.store(packed + row * (WIDTH // 2) + column, both, mask=inside)
    column = tl.arange(0, PADDED // 16)[None, :]
    inside = here & (column < WIDTH // 16)
    scale = tl.reshape(scale, (ROWS, PADDED // 16)).to(tl.uint8)
    tl.store(scales + row * (WIDTH // 16) + column, scale, mask=inside)
    tl.store(outer + row, fp4_triton.power(exponent), mask=here)
    if BITS:
        column = tl.arange(0, PADDED // 8)[None, :]
        inside = here & (column < WIDTH // 8)
        mantissa = fp4_triton.packed(code, ROWS, PADDED, 1)
        tl.store(bits + row * (WIDTH // 8) + column, mantissa, mask=inside)


def quantize_rows(x: jax.Array, bits: bool) -> tuple[jax.Array, ...]:
    """Codes, E4M3 scales, outer scales and mantissa bits of BF16 x [..., width]."""
    lead, width = x.shape[:-1], x.shape[-1]
    count, padded = math.prod(lead), triton.next_power_of_2(width)
    rows = max(1, _VALUES // padded)
    out = [
        jax.ShapeDtypeStruct((*lead, width // 2), jnp.uint8),
        jax.ShapeDtypeStruct((*lead, width // 16), jnp.uint8),
        jax.ShapeDtypeStruct((*lead, 1), jnp.float32),
        jax.ShapeDtypeStruct((*lead, width // 8 if bits else 1), jnp.uint8),
    ]
    return triton_call.call(
        quantize, (-(-count // rows), 1, 1), x, out=out,
        COUNT=count, WIDTH=width, ROWS=rows, PADDED=padded, BITS=bits,
    )  # fmt: skip
