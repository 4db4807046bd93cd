"""Attention of a decode step from the projection of one token a sequence on, in one call.

Contract, for every version:
  q, k, v = norm_rotary(projected, heads, kv_heads, q_weight, k_weight, cos, sin, eps=eps)
  pages, *left = append(pages, table, lengths - 1, k, v, record=record)
  out = paged_attention(q, pages, table, lengths, ...)
"reference" is these calls, each in its best version; "hopper" gives their bits in two launches
that overlap. The pool is written in place: donate it, or carry it through a loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.fp4.guidance import SiteGuidance
from trace_jax.kernels import cuda_build, dispatch, kv_attention
from trace_jax.kernels.kv_append import append
from trace_jax.kernels.kv_pages import KVPages
from trace_jax.kernels.norm_rotary import norm_rotary


class Attended(NamedTuple):
    """out BF16 [batch, heads, D], the pool, and guidance of the new rows as `append` leaves it."""

    out: jax.Array
    pages: KVPages
    k: SiteGuidance | None
    v: SiteGuidance | None


class Heads(NamedTuple):
    """What norms and turns queries and keys: FP32 [D] or None: no norm; FP32 [batch, D / 2]."""

    q_weight: jax.Array | None
    k_weight: jax.Array | None
    cos: jax.Array
    sin: jax.Array


def _reference(projected, heads, pages, table, lengths, eps, scale, window, sink, record):
    queries = _queries(projected, pages).shape[1]
    q, k, v = norm_rotary(projected, queries, pages.kv_heads, *heads, eps=eps)
    pages, *left = append(pages, table, lengths - 1, k, v, record=record)
    out = kv_attention.paged_attention(
        q, pages, table, lengths, scale=scale, window=window, sink=sink
    )
    return Attended(out, pages, *left)


def _hopper(projected, heads, pages, table, lengths, eps, scale, window, sink, record):
    q, d = _queries(projected, pages), pages.head_size
    (out, *scratch), numbers = kv_attention.hopper_call(q, pages, table.shape[1], window)
    rows = (q.shape[0], pages.kv_heads)
    bits = jax.ShapeDtypeStruct((*rows, (record or 0) * d // 8), jnp.uint8)
    scales = jax.ShapeDtypeStruct((*rows, 0 if record is None else d // 16), jnp.uint8)
    pool = jax.ShapeDtypeStruct(pages.data.shape, jnp.uint8)
    results = (pool, out, q, *scratch, bits, scales, bits, scales)
    fp32 = lambda a: jnp.zeros(0, jnp.float32) if a is None else a.astype(jnp.float32)
    call = jax.ffi.ffi_call(
        cuda_build.register("decode_attention", "paged_attention"),
        results,
        input_output_aliases={0: 0},
    )
    data, out, *_, k_bits, k_scales, v_bits, v_scales = call(
        pages.data, table, lengths, projected, *map(fp32, heads), fp32(sink),
        scale=np.float32(scale), eps=np.float32(eps), **numbers,
    )  # fmt: skip
    pages = pages.replace(data=data)
    if record is None:
        return Attended(out, pages, None, None)
    k_bits, v_bits = (b if record else None for b in (k_bits, v_bits))
    return Attended(out, pages, SiteGuidance(k_bits, k_scales), SiteGuidance(v_bits, v_scales))


VERSIONS = {"reference": _reference, "hopper": _hopper}


def _queries(projected, pages) -> jax.ShapeDtypeStruct:
    heads = projected.shape[1] // pages.head_size - 2 * pages.kv_heads
    return jax.ShapeDtypeStruct((projected.shape[0], heads, pages.head_size), jnp.bfloat16)


def decode_attention(
    projected: jax.Array,
    heads: Heads,
    pages: KVPages,
    table: jax.Array,
    lengths: jax.Array,
    *,
    eps: float,
    scale: float,
    window: int | None = None,
    sink: jax.Array | None = None,
    record: int | None = None,
    version: str = "auto",
) -> Attended:
    """Stores one token a sequence and attends to all that it has; see the module's contract.

    Args:
      projected: FP32 [batch, (heads + 2 kv_heads) D]: queries, keys, values.
      heads, eps: norms and rotation; see `norm_rotary`.
      pages, table: see `append`.
      lengths: int32 [batch], tokens with the new one; 0 for an idle slot.
      scale, window, sink: see `paged_attention`.
      record: see `append`.
      version: "auto", "reference" or "hopper".

    Raises:
      ValueError: a version that cannot run this call.
    """
    if record is not None and pages.kind != "nvfp4":
        raise ValueError(
            f"decode_attention: {pages.kind} pages have no FP4 outcomes; write record=None"
        )
    refusals = {
        "reference": lambda: None,
        "hopper": lambda: kv_attention.hopper_refusal(_queries(projected, pages), pages),
    }
    name = dispatch.choose("decode_attention", version, refusals, {"gpu": ("hopper",)})
    call = VERSIONS[name]
    return call(projected, heads, pages, table, lengths, eps, scale, window, sink, record)
