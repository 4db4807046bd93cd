"""One new token a sequence into the page pool, and what the trainer's guidance keeps of it.

Contract, for every version: K and V rows are stored exactly as kv_pages.write_pages stores
them, all other bytes of the pool stay, and the record holds the codec's codes and scales.
The fast versions write in place: inside a loop, or with the pool donated, nothing is copied.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.fp4 import formats
from trace_jax.fp4.guidance import SiteGuidance
from trace_jax.kernels import cuda_build, dispatch, kv_attention_tpu, kv_units, triton_call
from trace_jax.kernels.kv_pages import KVPages, columns, fields_of, units_of
from trace_jax.kernels.kv_units import KINDS, PAGE


class Appended(NamedTuple):
    """`pages`: the pool; `k`, `v`: guidance of the rows, [batch, kv_heads, ...], or None."""

    pages: KVPages
    k: SiteGuidance | None
    v: SiteGuidance | None


def _reference(pages, table, positions, k, v, record):
    last = table.shape[1] * PAGE
    at = jnp.clip(positions, 0, last - 1)
    page = jnp.take_along_axis(table, at[:, None] // PAGE, axis=1)[:, 0]
    page = jnp.where((positions < 0) | (positions >= last), pages.data.shape[0], page)
    kept = [_guidance(x, record) for x in (k, v)]
    if pages.layout == "tpu":
        k, v = columns(k), columns(v)
        arrays = kv_attention_tpu.set_token(pages.arrays, page, positions, k, v)
        return Appended(pages.with_arrays(arrays), *kept)
    old = pages.data.at[page].get(mode="fill", fill_value=0)
    here = (jnp.arange(PAGE)[None] == positions[:, None] % PAGE)[:, None, :, None]
    units = []
    for is_v, x in enumerate((k, v)):
        was = fields_of(pages, old[:, :, is_v], is_v)
        new = kv_units.encode(x[:, :, None], pages.kind)
        both = tuple(jnp.where(here, n, w) for n, w in zip(new, was, strict=True))
        units.append(units_of(pages, both, is_v))
    data = pages.data.at[page].set(jnp.stack(units, axis=2), mode="drop")
    return Appended(pages.replace(data=data), *kept)


def _guidance(x, record) -> SiteGuidance | None:
    if record is None:
        return None
    codes, scales, _ = kv_units.encode(x, "nvfp4")
    bits = None
    if record == 1:
        bits = jnp.packbits(formats.mantissa_bits(codes), axis=-1, bitorder="little")
    elif record == 4:
        bits = formats.pack(codes)
    return SiteGuidance(bits, scales)


def _hopper(pages, table, positions, k, v, record):
    rows, d = k.shape[:2], k.shape[-1]
    bits = jax.ShapeDtypeStruct((*rows, (record or 0) * d // 8), jnp.uint8)
    scales = jax.ShapeDtypeStruct((*rows, 0 if record is None else d // 16), jnp.uint8)
    out = (jax.ShapeDtypeStruct(pages.data.shape, jnp.uint8), bits, scales, bits, scales)
    data, k_bits, k_scales, v_bits, v_scales = jax.ffi.ffi_call(
        cuda_build.register("kv_append"), out, input_output_aliases={0: 0}
    )(pages.data, table, positions, k, v, kind=np.int64(KINDS.index(pages.kind)))
    pages = pages.replace(data=data)
    if record is None:
        return Appended(pages, None, None)
    k_bits, v_bits = (b if record else None for b in (k_bits, v_bits))
    return Appended(pages, SiteGuidance(k_bits, k_scales), SiteGuidance(v_bits, v_scales))


def _triton(pages, table, positions, k, v, record):
    from trace_jax.kernels import kv_append_triton

    data, *kept = kv_append_triton.store(pages, table, positions, k, v, record)
    pages = pages.replace(data=data)
    if record is None:
        return Appended(pages, None, None)
    k_bits, k_scales, v_bits, v_scales = kept
    k_bits, v_bits = (b if record else None for b in (k_bits, v_bits))
    return Appended(pages, SiteGuidance(k_bits, k_scales), SiteGuidance(v_bits, v_scales))


VERSIONS = {"reference": _reference, "hopper": _hopper, "triton": _triton}


def _hopper_refusal(pages: KVPages) -> str | None:
    if pages.layout != "hopper":
        return f"it takes pages in the layout 'hopper', not {pages.layout!r}"
    return cuda_build.hopper_refusal()


def _triton_refusal(pages: KVPages) -> str | None:
    if pages.layout != "triton":
        return f"it takes pages in the layout 'triton', not {pages.layout!r}"
    return triton_call.refusal()


def append(
    pages: KVPages,
    table: jax.Array,
    positions: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    record: int | None = None,
    version: str = "auto",
) -> Appended:
    """Stores one token a sequence.

    Args:
      pages: the pool; donate it, or carry it through a loop.
      table: int32 [batch, max_pages], each sequence's page ids in order. No two sequences may
        write the same page.
      positions: int32 [batch]; a negative one, or one past the table, stores nothing.
      k, v: [batch, kv_heads, D], rounded to BF16 here; K after RoPE.
      record: None; or the bits a value to return beside the block scales: 0, 1 (mantissa bits)
        or 4 (codes), as in GuidancePlan.bits. Of every row given, stored or not.
      version: "auto", "reference", "hopper" or "triton".

    Raises:
      ValueError: rows that do not fit the pool, a record of rows that are not NVFP4, or a
        version that cannot run this call.
    """
    want = (positions.shape[0], pages.kv_heads, pages.head_size)
    if k.shape != want or v.shape != want:
        raise ValueError(
            f"append: k {k.shape} and v {v.shape} do not fit the pool; both need {want}"
        )
    if record not in (None, 0, 1, 4):
        raise ValueError(f"append: record is {record}; write None, 0, 1 or 4")
    if record is not None and pages.kind != "nvfp4":
        raise ValueError(f"append: {pages.kind} pages have no FP4 outcomes; write record=None")
    refusals = {
        "reference": lambda: None,
        "hopper": lambda: _hopper_refusal(pages),
        "triton": lambda: _triton_refusal(pages),
    }
    name = dispatch.choose("append", version, refusals, {"gpu": ("hopper", "triton")})
    k, v = (x.astype(jnp.bfloat16) for x in (k, v))
    return VERSIONS[name](pages, table, positions, k, v, record)
