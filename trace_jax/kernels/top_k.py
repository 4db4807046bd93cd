"""Router logits to experts, gate weights and the order of slots by expert, in one launch.

Contract, for every version: logits are the sum of their parts, the last added first; the
`top_k` largest a token, ties to the lower index; gates are their softmax over all experts,
or normalized to sum to one; the order is expert_matmul.route's.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trace_jax.kernels import cuda_build, dispatch
from trace_jax.kernels.expert_matmul import Routing, route


class Choice(NamedTuple):
    """ids int32 and gates FP32 [tokens, top_k], and the slots in the order of their experts."""

    ids: jax.Array
    gates: jax.Array
    order: Routing


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
    ids = ids.astype(jnp.int32)
    return Choice(ids, gates, route(ids, logits.shape[-1]))


def _hopper(logits, top_k, normalize):
    shape, ints = (logits.shape[0], top_k), lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
    out = (
        ints(*shape), jax.ShapeDtypeStruct(shape, jnp.float32),
        ints(logits.shape[0] * top_k), ints(logits.shape[-1] + 1),
    )  # fmt: skip
    call = jax.ffi.ffi_call(cuda_build.register("top_k"), out)
    ids, gates, *order = call(logits, normalize=normalize)
    return Choice(ids, gates, Routing(*order))


VERSIONS = {"reference": _reference, "hopper": _hopper}


def _hopper_refusal(logits: jax.Array, top_k: int) -> str | None:
    if logits.shape[-1] > 512 or top_k > 32:
        return f"it takes up to 512 experts and 32 choices, not {logits.shape[-1]} and {top_k}"
    return cuda_build.hopper_refusal()


def choose_experts(
    logits: jax.Array, top_k: int, *, normalize: bool, version: str = "auto"
) -> Choice:
    """The experts of each token, from FP32 logits [tokens, 1 or 3 parts, experts].

    Args:
      version: "auto", "reference" or "hopper".

    Raises:
      ValueError: a version that cannot run this call.
    """
    refusals = {"reference": lambda: None, "hopper": lambda: _hopper_refusal(logits, top_k)}
    name = dispatch.choose("top_k", version, refusals, {"gpu": ("hopper",)})
    return VERSIONS[name](logits, top_k, normalize)
