"""Activations to NVFP4 in one pass: codes, block scales, outer scales and guidance bits.

Contract, for every version: exactly `fp4.quantize(x, format, outer_axes=(last,))` of BF16 rows
with a power-of-two outer scale a row, and the mantissa bit of every code, eight a byte, first
value in the low bit. A row with NaN or Inf has NaN scales.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trace_jax.fp4 import formats, qtensor
from trace_jax.fp4.formats import NVFP4, Format
from trace_jax.fp4.qtensor import QTensor
from trace_jax.kernels import cuda_build, dispatch, triton_call

ROW_FORMAT = NVFP4.replace(name="nvfp4_rows", outer="pow2")


class QuantizedRows(NamedTuple):
    """`q`: the rows; `bits`: uint8 [..., ceil(width / 8)], mantissa bits, or None."""

    q: QTensor
    bits: jax.Array | None


def _reference(x: jax.Array, fmt: Format, bits: bool) -> QuantizedRows:
    q = qtensor.quantize(x, fmt, outer_axes=(x.ndim - 1,))
    if not bits:
        return QuantizedRows(q, None)
    packed = jnp.packbits(formats.mantissa_bits(q.codes), axis=-1, bitorder="little")
    return QuantizedRows(q, packed)


def _hopper(x: jax.Array, fmt: Format, bits: bool) -> QuantizedRows:
    lead, width = x.shape[:-1], x.shape[-1]
    out = (
        jax.ShapeDtypeStruct((*lead, width // 2), jnp.uint8),
        jax.ShapeDtypeStruct((*lead, width // 16), jnp.uint8),
        jax.ShapeDtypeStruct((*lead, 1), jnp.float32),
        jax.ShapeDtypeStruct((*lead, width // 8 if bits else 0), jnp.uint8),
    )
    packed, scale, outer, mask = jax.ffi.ffi_call(cuda_build.register("quantize"), out)(x)
    q = QTensor(packed, scale, outer, fmt, -1, width, jnp.dtype(x.dtype))
    return QuantizedRows(q, mask if bits else None)


def _triton(x: jax.Array, fmt: Format, bits: bool) -> QuantizedRows:
    from trace_jax.kernels import quantize_triton

    packed, scale, outer, mask = quantize_triton.quantize_rows(x, bits)
    q = QTensor(packed, scale, outer, fmt, -1, x.shape[-1], jnp.dtype(x.dtype))
    return QuantizedRows(q, mask if bits else None)


VERSIONS = {"reference": _reference, "hopper": _hopper, "triton": _triton}


def _gpu_refusal(x: jax.Array, fmt: Format) -> str | None:
    if x.dtype != jnp.bfloat16:
        return f"it takes BF16 rows, not {x.dtype}"
    if (fmt.scale_type, fmt.scale_rule, fmt.outer) != ("e4m3", "six", "pow2"):
        return f"it takes NVFP4 with the plain scale rule and power-of-two rows, not {fmt.name}"
    if x.shape[-1] % 16 or x.shape[-1] > 4096:
        return f"it takes widths up to 4096 that are multiples of 16, not {x.shape[-1]}"
    return None


def quantize_rows(
    x: jax.Array, fmt: Format = ROW_FORMAT, *, bits: bool = True, version: str = "auto"
) -> QuantizedRows:
    """Quantizes x [..., width] along its last axis; the module docstring is the contract.

    Args:
      x: BF16 (the source both sides of a rollout share).
      fmt: the rows' format; the fast versions take NVFP4 with power-of-two outer scales.
      bits: also return the mantissa bits.
      version: "auto", "reference", "hopper" or "triton".

    Raises:
      ValueError: a version that cannot run this call.
    """
    refusals = {
        "reference": lambda: None,
        "hopper": lambda: _gpu_refusal(x, fmt) or cuda_build.hopper_refusal(),
        "triton": lambda: _gpu_refusal(x, fmt) or triton_call.refusal(),
    }
    name = dispatch.choose("quantize", version, refusals, {"gpu": ("hopper", "triton")})
    return VERSIONS[name](x, fmt, bits)
