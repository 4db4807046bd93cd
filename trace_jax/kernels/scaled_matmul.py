"""Dense W4A4 product: rows in NVFP4 times a weight in NVFP4.

Contract, for every version: x [..., K] and w [N, K] to FP32 [..., N],
  out = (codes x block scales of x) @ (codes x block scales of w)^T * outer of x * outer of w.
Both factors are exact in BF16, so versions differ by the order of FP32 sums alone.

"native" multiplies FP4 by FP4 on the tensor cores of Blackwell. It is compiled in tests, for
a device that is not here, and has never been run.
"""

import jax
import jax.numpy as jnp

from trace_jax.fp4.qtensor import QTensor, unscaled
from trace_jax.kernels import dispatch


def _reference(x: QTensor, w: QTensor) -> jax.Array:
    return jnp.matmul(unscaled(x), unscaled(w).T, preferred_element_type=jnp.float32)


def _native(x: QTensor, w: QTensor) -> jax.Array:
    (x4, x8), (w4, w8) = _as_floats(x), _as_floats(w)
    out = jax.nn.scaled_matmul(x4, w4, x8, w8, preferred_element_type=jnp.float32)
    return out.reshape(*x.packed.shape[:-1], -1)


def _as_floats(q: QTensor) -> tuple[jax.Array, jax.Array]:
    """Codes and block scales [1, rows, ...] in the types that the tensor cores take."""
    codes = jax.lax.bitcast_convert_type(q.packed, jnp.float4_e2m1fn)
    scales = jax.lax.bitcast_convert_type(q.block_scale, jnp.float8_e4m3fn)
    return codes.reshape(1, -1, q.length), scales.reshape(1, -1, scales.shape[-1])


VERSIONS = {"reference": _reference, "native": _native}


def _native_refusal(x: QTensor, w: QTensor) -> str | None:
    if x.length % 32 or w.packed.shape[0] % 8:
        return f"it takes K in multiples of 32 and N of 8, not {x.length} and {w.packed.shape[0]}"
    if dispatch.platform() != "gpu":
        return f"it needs an NVIDIA Blackwell GPU; the platform is {dispatch.platform()}"
    capability = str(getattr(dispatch.device(), "compute_capability", "0"))
    if float(capability) < 10:
        return f"it needs compute capability 10 (Blackwell); this device has {capability}"
    return None


def scaled_matmul(x: QTensor, w: QTensor, *, version: str = "auto") -> jax.Array:
    """The product; the module docstring is the contract.

    Args:
      x: [..., K]; w: [N, K]; blocks of NVFP4 along K, any outer scales.
      version: "auto" (the reference: the native one is untried), "reference" or "native".

    Raises:
      ValueError: operands that do not fit, or a version that cannot run this call.
    """
    if x.length != w.length or w.packed.ndim != 2 or "e8m0" in (
        x.format.scale_type, w.format.scale_type
    ):  # fmt: skip
        raise ValueError(
            f"scaled_matmul: {x.format.name} {x.shape} and {w.format.name} {w.shape}; write NVFP4 "
            "rows [..., K] and a weight [N, K]"
        )
    refusals = {"reference": lambda: None, "native": lambda: _native_refusal(x, w)}
    name = dispatch.choose("scaled_matmul", version, refusals, {})
    of_columns = w.outer.reshape(*[1] * (x.outer.ndim - 1), -1)
    return VERSIONS[name](x, w) * x.outer * of_columns
