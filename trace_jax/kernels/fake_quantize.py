"""Activations to the values that FP4 makes of them, and their guidance, in one launch.

Contract, for every version: the values, codes and scales of `fp4.quantize_site(x, format)`,
as BF16 values and as SiteGuidance with 8-bit scales.
"""

import jax
import jax.numpy as jnp

from trace_jax.fp4 import GuidancePlan, compact, quantize_site
from trace_jax.fp4.formats import Format
from trace_jax.fp4.guidance import SiteGuidance
from trace_jax.kernels import cuda_build, dispatch
from trace_jax.kernels.quantize import ROW_FORMAT


def _reference(x, fmt, record):
    out = quantize_site(x, fmt)
    if record is None:
        return out.value, None
    return out.value, compact(out.codes, out.scale_bytes, GuidancePlan(bits=record))


def _hopper(x, fmt, record):
    lead, width = x.shape[:-1], x.shape[-1]
    out = (
        jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
        jax.ShapeDtypeStruct((*lead, (record or 0) * width // 8), jnp.uint8),
        jax.ShapeDtypeStruct((*lead, 0 if record is None else width // 16), jnp.uint8),
    )
    value, bits, scales = jax.ffi.ffi_call(cuda_build.register("fake_quantize"), out)(x)
    return value, None if record is None else SiteGuidance(bits if record else None, scales)


VERSIONS = {"reference": _reference, "hopper": _hopper}


def hopper_refusal(x: jax.Array, fmt: Format) -> str | None:
    """Why the CUDA kernel cannot quantize x [..., width] in a format; None if it can."""
    if x.dtype != jnp.bfloat16:
        return f"it takes BF16 rows, not {x.dtype}"
    if fmt.replace(name=ROW_FORMAT.name) != ROW_FORMAT:
        return f"it takes NVFP4 with the plain scale rule and power-of-two rows, not {fmt.name}"
    if x.shape[-1] % 16 or x.shape[-1] > 4096:
        return f"it takes widths up to 4096 that are multiples of 16, not {x.shape[-1]}"
    return cuda_build.hopper_refusal()


def fake_quantize_rows(
    x: jax.Array, fmt: Format, *, record: int | None = None, version: str = "auto"
) -> tuple[jax.Array, SiteGuidance | None]:
    """Quantizes x [..., width] along its last axis and decodes it again.

    Args:
      x: BF16, or what is rounded to it.
      fmt: the rows' format; the fast version takes NVFP4 with power-of-two outer scales.
      record: None; or the bits a value of the guidance to return: 0, 1 (mantissa bits) or 4.
      version: "auto", "reference" or "hopper".

    Returns:
      BF16 values [..., width] and, with `record`, the rows' guidance.

    Raises:
      ValueError: a version that cannot run this call.
    """
    refusals = {"reference": lambda: None, "hopper": lambda: hopper_refusal(x, fmt)}
    name = dispatch.choose("fake_quantize", version, refusals, {"gpu": ("hopper",)})
    return VERSIONS[name](x, fmt, record)
