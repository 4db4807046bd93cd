"""Queries and keys of one token a sequence: norm of each head, then rotation, in one launch.

Contract, for every version: y = bf16(x / rms(x) * weight) over each head, where there is a
weight; then pairs (i, i + D / 2) of y are turned: (a cos - b sin, b cos + a sin), rounded to
BF16. All in FP32 in between.
"""

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.fp4.formats import fp32_source
from trace_jax.kernels import cuda_build, dispatch


def _reference(q, k, q_weight, k_weight, cos, sin, eps):
    cos, sin = cos[:, None], sin[:, None]

    def one(x, weight):
        y = x.astype(jnp.float32)
        if weight is not None:
            y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
            y = fp32_source(y * weight[None, None], jnp.bfloat16)
        a, b = jnp.split(y, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return fp32_source(turned, jnp.bfloat16).astype(jnp.bfloat16)

    return one(q, q_weight), one(k, k_weight)


def _hopper(q, k, q_weight, k_weight, cos, sin, eps):
    out = tuple(jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (q, k))
    none = jnp.zeros(0, jnp.float32)
    weights = [none if w is None else w.astype(jnp.float32) for w in (q_weight, k_weight)]
    call = jax.ffi.ffi_call(cuda_build.register("norm_rotary"), out)
    return call(q, k, *weights, cos, sin, eps=np.float32(eps))


VERSIONS = {"reference": _reference, "hopper": _hopper}


def _hopper_refusal(q: jax.Array) -> str | None:
    if q.dtype != jnp.bfloat16:
        return f"it takes BF16, not {q.dtype}"
    if q.shape[-1] not in (64, 128, 256):
        return f"it takes heads of 64, 128 or 256, not {q.shape[-1]}"
    return cuda_build.hopper_refusal()


def norm_rotary(
    q: jax.Array,
    k: jax.Array,
    q_weight: jax.Array | None,
    k_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float,
    version: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Rotated queries and keys, of q's and k's shapes.

    Args:
      q, k: BF16 [tokens, heads, D] and [tokens, kv_heads, D].
      q_weight, k_weight: FP32 [D], or None: no norm.
      cos, sin: FP32 [tokens, D / 2].
      version: "auto", "reference" or "hopper".

    Raises:
      ValueError: a version that cannot run this call.
    """
    refusals = {"reference": lambda: None, "hopper": lambda: _hopper_refusal(q)}
    name = dispatch.choose("norm_rotary", version, refusals, {"gpu": ("hopper",)})
    return VERSIONS[name](q, k, q_weight, k_weight, cos, sin, eps)
