"""A residual stream, its norm, and the normed rows quantized, in one launch.

Contract, for every version: with gates, y is the sum of gates x y over the last axis but one;
sum = bf16(x + bf16(y)); normed = bf16(sum / rms(sum) * weight), in FP32 in between; and with a
format the values and guidance of `fake_quantize_rows(normed)`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.fp4.formats import Format, fp32_source
from trace_jax.fp4.guidance import SiteGuidance
from trace_jax.kernels import cuda_build, dispatch, fake_quantize


class Normed(NamedTuple):
    """BF16 [..., width] each; `value` and `guidance` are None without a format, or a record."""

    sum: jax.Array
    normed: jax.Array
    value: jax.Array | None
    guidance: SiteGuidance | None


def _reference(x, y, gates, weight, eps, fmt, record):
    if gates is not None:
        y = jnp.sum(y * gates[..., None], axis=-2)
    total = fp32_source(x.astype(jnp.float32) + fp32_source(y, x.dtype), x.dtype)
    scale = jax.lax.rsqrt(jnp.mean(total * total, axis=-1, keepdims=True) + eps)
    weight = jnp.expand_dims(weight, range(x.ndim - 1))
    normed = fp32_source(total * scale * weight, x.dtype).astype(x.dtype)
    value, guidance = None, None
    if fmt is not None:
        value, guidance = fake_quantize.fake_quantize_rows(
            normed, fmt, record=record, version="reference"
        )
        value = value.astype(x.dtype)
    return Normed(total.astype(x.dtype), normed, value, guidance)


def _hopper(x, y, gates, weight, eps, fmt, record):
    lead, width = x.shape[:-1], x.shape[-1]
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    bits, scales = ((record or 0) * width // 8, width // 16) if record is not None else (0, 0)
    out = (
        like, like,
        like if fmt is not None else jax.ShapeDtypeStruct((0,), x.dtype),
        jax.ShapeDtypeStruct((*lead, bits), jnp.uint8),
        jax.ShapeDtypeStruct((*lead, scales), jnp.uint8),
    )  # fmt: skip
    call = jax.ffi.ffi_call(cuda_build.register("add_norm"), out)
    gates = jnp.zeros(0, jnp.float32) if gates is None else gates
    total, normed, value, bits, scales = call(x, y, gates, weight, eps=np.float32(eps))
    guidance = None if record is None else SiteGuidance(bits if record else None, scales)
    return Normed(total, normed, None if fmt is None else value, guidance)


VERSIONS = {"reference": _reference, "hopper": _hopper}


def _hopper_refusal(x: jax.Array, fmt: Format | None) -> str | None:
    if fmt is not None:
        return fake_quantize.hopper_refusal(x, fmt)
    if x.dtype != jnp.bfloat16:
        return f"it takes BF16 rows, not {x.dtype}"
    if x.shape[-1] % 8 or x.shape[-1] > 8192:
        return f"it takes widths up to 8192 that are multiples of 8, not {x.shape[-1]}"
    return cuda_build.hopper_refusal()


def add_norm(
    x: jax.Array,
    y: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    gates: jax.Array | None = None,
    fmt: Format | None = None,
    record: int | None = None,
    version: str = "auto",
) -> Normed:
    """Adds y to the residual stream x, norms the sum, quantizes that.

    Args:
      x: BF16 [..., width].
      y: BF16 or FP32 [..., width]; with gates FP32 [..., n, width].
      weight: FP32 [width].
      gates: FP32 [..., n], weights of y's rows.
      fmt: format of the quantized rows; None: they are not quantized.
      record: see `fake_quantize_rows`; None without a format.
      version: "auto", "reference" or "hopper".

    Raises:
      ValueError: a version that cannot run this call.
    """
    refusals = {"reference": lambda: None, "hopper": lambda: _hopper_refusal(x, fmt)}
    name = dispatch.choose("add_norm", version, refusals, {"gpu": ("hopper",)})
    return VERSIONS[name](x, y, gates, weight.astype(jnp.float32), eps, fmt, record)
