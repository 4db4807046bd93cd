"""Queries, keys and values of one token a sequence from their projection, in one launch.

Contract, for every version: the FP32 projection is rounded to BF16. Queries and keys:
y = bf16(x / rms(x) * weight) over each head, where there is a weight; then pairs (i, i + D / 2)
of y are turned: (a cos - b sin, b cos + a sin), rounded to BF16. All in FP32 in between.
"""

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.fp4.formats import fp32_source
from trace_jax.kernels import cuda_build, dispatch


def _reference(projected, heads, kv_heads, q_weight, k_weight, cos, sin, eps):
    tokens = projected.shape[0]
    x = fp32_source(projected, jnp.bfloat16).reshape(tokens, heads + 2 * kv_heads, -1)
    q, k, v = jnp.split(x, (heads, heads + kv_heads), axis=1)
    cos, sin = cos[:, None], sin[:, None]

    def one(y, weight):
        if weight is not None:
            y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
            y = fp32_source(y * weight[None, None], jnp.bfloat16)
        a, b = jnp.split(y, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return fp32_source(turned, jnp.bfloat16).astype(jnp.bfloat16)

    return one(q, q_weight), one(k, k_weight), v.astype(jnp.bfloat16)


def _hopper(projected, heads, kv_heads, q_weight, k_weight, cos, sin, eps):
    d = 2 * cos.shape[-1]
    out = tuple(
        jax.ShapeDtypeStruct((projected.shape[0], h, d), jnp.bfloat16)
        for h in (heads, kv_heads, kv_heads)
    )
    none = jnp.zeros(0, jnp.float32)
    weights = [none if w is None else w.astype(jnp.float32) for w in (q_weight, k_weight)]
    call = jax.ffi.ffi_call(cuda_build.register("norm_rotary"), out)
    return tuple(call(projected, *weights, cos, sin, eps=np.float32(eps)))


VERSIONS = {"reference": _reference, "hopper": _hopper}


def _hopper_refusal(d: int) -> str | None:
    if d not in (64, 128, 256):
        return f"it takes heads of 64, 128 or 256, not {d}"
    return cuda_build.hopper_refusal()


def norm_rotary(
    projected: jax.Array,
    heads: int,
    kv_heads: int,
    q_weight: jax.Array | None,
    k_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float,
    version: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normed, rotated queries and keys, and values: BF16 [tokens, heads or kv_heads, D].

    Args:
      projected: FP32 [tokens, (heads + 2 kv_heads) D]: queries, keys, values.
      q_weight, k_weight: FP32 [D], or None: no norm.
      cos, sin: FP32 [tokens, D / 2].
      version: "auto", "reference" or "hopper".

    Raises:
      ValueError: a version that cannot run this call.
    """
    refusals = {"reference": lambda: None, "hopper": lambda: _hopper_refusal(2 * cos.shape[-1])}
    name = dispatch.choose("norm_rotary", version, refusals, {"gpu": ("hopper",)})
    call = VERSIONS[name]
    return call(projected, heads, kv_heads, q_weight, k_weight, cos, sin, eps)
