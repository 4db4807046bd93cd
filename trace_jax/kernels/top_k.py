"""Router logits to experts and gate weights, in one launch.

Contract, for every version: logits are the sum of their parts, the last added first; the
`top_k` largest a token, ties to the lower index; gates are their softmax over all experts,
or normalized to sum to one.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from trace_jax.kernels import cuda_build, dispatch


def add_parts(logits: jax.Array) -> jax.Array:
    """FP32 [tokens, parts, experts] to [tokens, experts]; the last part first."""
    parts = [logits[:, i] for i in range(logits.shape[1])]
    return functools.reduce(operator.add, parts[::-1])


def _reference(logits, top_k, normalize):
    logits = add_parts(logits)
    _, ids = jax.lax.top_k(logits, top_k)
    gates = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), ids, axis=-1)
    if normalize:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    return ids.astype(jnp.int32), gates


def _hopper(logits, top_k, normalize):
    shape = (logits.shape[0], top_k)
    out = (jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32))
    return jax.ffi.ffi_call(cuda_build.register("top_k"), out)(logits, normalize=normalize)


VERSIONS = {"reference": _reference, "hopper": _hopper}


def _hopper_refusal(logits: jax.Array, top_k: int) -> str | None:
    if logits.shape[-1] > 512 or top_k > 32:
        return f"it takes up to 512 experts and 32 choices, not {logits.shape[-1]} and {top_k}"
    return cuda_build.hopper_refusal()


def choose_experts(
    logits: jax.Array, top_k: int, *, normalize: bool, version: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """ids int32 and gates FP32 [tokens, top_k] of FP32 logits [tokens, 1 or 3 parts, experts].

    Args:
      version: "auto", "reference" or "hopper".

    Raises:
      ValueError: a version that cannot run this call.
    """
    refusals = {"reference": lambda: None, "hopper": lambda: _hopper_refusal(logits, top_k)}
    name = dispatch.choose("top_k", version, refusals, {"gpu": ("hopper",)})
    return VERSIONS[name](logits, top_k, normalize)
