"""Paged K and V in the layout that the attention kernels read.

A page holds 64 tokens of one KV head, K and V as one unit of bytes each. NVFP4 rows are
quantized along the head size with a power-of-two outer scale a (token, head) row; a unit is
codes (32 D bytes), block scales (4 D, as E5M3) and the rows' exponents (64). A BF16 unit is
128 D bytes. Inside a unit, values stand in the order in which lanes of a warp use them, so
only this file and the kernels know where a token is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from trace_jax.fp4 import formats
from trace_jax.fp4.formats import NVFP4
from trace_jax.fp4.qtensor import QTensor, quantize
from trace_jax.kernels import dispatch, kv_attention_tpu
from trace_jax.kernels.expert_matmul import _E5M3, _decode_words, interlock, to_e5m3

PAGE = 64
KV_FORMAT = NVFP4.replace(name="nvfp4_kv", outer="pow2")


@struct.dataclass
class KVPages:
    """A pool of pages.

    Attributes:
      data: uint8 [pages, kv_heads, 2 (K, V), unit bytes]; with layout "tpu" the codes, see
        kv_attention_tpu.
      head_size, quantized: static; quantized says NVFP4 or BF16.
      scales, exponents: None, or the other two arrays of layout "tpu".
      layout: static, "hopper" or "tpu" (NVFP4 only).
    """

    data: jax.Array
    head_size: int = struct.field(pytree_node=False)
    quantized: bool = struct.field(pytree_node=False)
    scales: jax.Array | None = None
    exponents: jax.Array | None = None
    layout: str = struct.field(pytree_node=False, default="hopper")

    @property
    def kv_heads(self) -> int:
        return self.exponents.shape[1] if self.layout == "tpu" else self.data.shape[1]

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The three arrays of layout "tpu"."""
        return self.data, self.scales, self.exponents


class Rows(NamedTuple):
    """Decoded form of NVFP4 units: codes uint8 [..., 64, D], scales (E4M3 bytes)
    [..., 64, D / 16], exponents (biased by 127) uint8 [..., 64]."""

    codes: jax.Array
    scales: jax.Array
    exponents: jax.Array


def unit_bytes(head_size: int, quantized: bool) -> int:
    """Bytes of 64 tokens of K or of V of one head."""
    return 36 * head_size + PAGE if quantized else 2 * PAGE * head_size


def new_pages(
    num_pages: int, kv_heads: int, head_size: int, quantized: bool = True, layout: str = "auto"
) -> KVPages:
    """An empty pool.

    Args:
      quantized: NVFP4, else BF16.
      layout: "hopper", "tpu", or "auto": "tpu" for NVFP4 on a TPU, else "hopper".

    Raises:
      ValueError: a head size other than 64, 128 or 256; or BF16 in layout "tpu".
    """
    if head_size not in (64, 128, 256):
        raise ValueError(f"KV pages: head size {head_size}; pages take 64, 128 or 256")
    if layout == "auto":
        layout = "tpu" if quantized and dispatch.platform() == "tpu" else "hopper"
    if layout == "hopper":
        shape = (num_pages, kv_heads, 2, unit_bytes(head_size, quantized))
        return KVPages(jnp.zeros(shape, jnp.uint8), head_size, quantized)
    if layout != "tpu" or not quantized:
        raise ValueError(f"KV pages: layout {layout!r}; write auto, hopper, or tpu for NVFP4")
    rows = (kv_heads * head_size // 2, kv_heads * head_size // 16, kv_heads)
    codes, scales, exponents = (jnp.zeros((num_pages, r, 2 * PAGE), jnp.uint8) for r in rows)
    return KVPages(codes, head_size, True, scales, exponents, "tpu")


def write_pages(pages: KVPages, ids: jax.Array, k: jax.Array, v: jax.Array) -> KVPages:
    """Stores whole pages: k, v [n, 64, kv_heads, D] (BF16) at page ids int32 [n].

    Ids beyond the pool are dropped. Slots of tokens that do not exist yet may hold anything.
    """
    k, v = (x.astype(jnp.bfloat16).transpose(0, 2, 1, 3) for x in (k, v))
    if pages.layout == "tpu":
        new = kv_attention_tpu.pages_of(_columns(k), _columns(v))
        return _replace(
            pages,
            [a.at[ids].set(n, mode="drop") for a, n in zip(pages.arrays, new, strict=True)],
        )
    if pages.quantized:
        units = [_lay_out_rows(_rows(x), is_v) for is_v, x in enumerate((k, v))]
    else:
        units = [_lay_out_bf16(x, is_v) for is_v, x in enumerate((k, v))]
    data = pages.data.at[ids].set(jnp.stack(units, axis=2), mode="drop")
    return pages.replace(data=data)


def append(
    pages: KVPages, table: jax.Array, positions: jax.Array, k: jax.Array, v: jax.Array
) -> KVPages:
    """Stores one token a sequence: k, v [batch, kv_heads, D] at positions int32 [batch].

    `table` int32 [batch, max_pages] names each sequence's pages. A negative position stores
    nothing. No two sequences may write the same page.
    """
    page = jnp.take_along_axis(table, jnp.maximum(positions, 0)[:, None] // PAGE, axis=1)[:, 0]
    page = jnp.where(positions < 0, pages.data.shape[0], page)
    if pages.layout == "tpu":
        k, v = (_columns(x.astype(jnp.bfloat16)) for x in (k, v))
        return _replace(pages, kv_attention_tpu.set_token(pages.arrays, page, positions, k, v))
    old = pages.data.at[page].get(mode="fill", fill_value=0)
    at = (jnp.arange(PAGE)[None] == positions[:, None] % PAGE)[:, None, :, None]
    units = []
    for is_v, x in enumerate((k, v)):
        x = x.astype(jnp.bfloat16)[:, :, None]
        if pages.quantized:
            was, new = _rows_of(old[:, :, is_v], pages.head_size, is_v), _rows(x)
            both = [jnp.where(at, n, w) for w, n in zip(was[:2], new[:2], strict=True)]
            exponents = jnp.where(at[..., 0], new.exponents, was.exponents)
            units.append(_lay_out_rows(Rows(*both, exponents), is_v))
        else:
            was = _bf16_of(old[:, :, is_v], pages.head_size, is_v)
            units.append(_lay_out_bf16(jnp.where(at, x, was), is_v))
    return pages.replace(data=pages.data.at[page].set(jnp.stack(units, axis=2), mode="drop"))


def read_pages(pages: KVPages, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V of pages ids int32 [...]: FP32 [..., kv_heads, 64, D]; the plain-XLA way in."""
    if pages.layout == "tpu":
        arrays = [a[ids] for a in pages.arrays]
        return kv_attention_tpu.read(arrays, pages.kv_heads, pages.head_size)
    data = pages.data[ids]
    both = []
    for is_v in range(2):
        unit = data[..., is_v, :]
        if pages.quantized:
            rows = _rows_of(unit, pages.head_size, is_v)
            value = formats.decode_e2m1(formats.to_blocks(rows.codes, KV_FORMAT))
            value = value * formats.decode_scale(rows.scales, KV_FORMAT)[..., None]
            power = rows.exponents.astype(jnp.uint32) << 23
            outer = jax.lax.bitcast_convert_type(power, jnp.float32)[..., None]
            both.append(formats.from_blocks(value, pages.head_size) * outer)
        else:
            both.append(_bf16_of(unit, pages.head_size, is_v).astype(jnp.float32))
    return both[0], both[1]


def _columns(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = _rows(x)
    return kv_attention_tpu.columns(rows.codes, to_e5m3(rows.scales), rows.exponents)


def _replace(pages: KVPages, arrays) -> KVPages:
    return pages.replace(data=arrays[0], scales=arrays[1], exponents=arrays[2])


# --- quantized rows -----------------------------------------------------------------------


def _rows(x: jax.Array) -> Rows:
    q: QTensor = quantize(x, KV_FORMAT, outer_axes=(x.ndim - 1,))
    exponent = jax.lax.bitcast_convert_type(q.outer[..., 0], jnp.uint32) >> 23
    return Rows(q.codes, q.block_scale, exponent.astype(jnp.uint8))


def _words(codes: jax.Array) -> jax.Array:
    """Codes [..., 8] to interlocked words."""
    return interlock(formats.pack(codes))


def _lay_out_rows(rows: Rows, is_v: int) -> jax.Array:
    """Rows [..., 64, D] to units [..., bytes]."""
    lead, d = rows.codes.shape[:-2], rows.codes.shape[-1]
    if is_v:
        words = _words(_move(rows.codes.reshape(-1, 4, 2, 4, 2, d // 16, 2, 8), _V_CODES, 8))
        scales = _move(rows.scales.reshape(-1, 4, 2, 4, 2, d // 16), _V_SCALES)
    else:
        shape = (-1, 4, 2, 8, d // 64, 4, 2, 8)
        words = _words(_move(rows.codes.reshape(shape), _K_CODES))
        scales = _move(rows.scales.reshape(-1, 4, 2, 8, d // 64, 4), _K_SCALES)
    outer = rows.exponents.reshape(-1, 4, 2, 8).transpose(0, 3, 1, 2)
    parts = (jax.lax.bitcast_convert_type(words, jnp.uint8), to_e5m3(scales), outer)
    return jnp.concatenate([p.reshape(*lead, -1) for p in parts], axis=-1)


# Axes from token-major order to a unit's. K codes: i, half, g, c, t, word, 8 of
# (token 16 i + 8 half + g, dim 64 c + 16 t + 8 word + .). V codes: j, half, t, lohi, G, row, g of
# (token 16 j + 8 half + 2 t + lohi, dim 16 G + 8 row + g).
_K_CODES = (0, 1, 4, 3, 5, 2, 6, 7)
_K_SCALES = (0, 1, 4, 3, 5, 2)
_V_CODES = (0, 5, 7, 3, 6, 1, 2, 4)
_V_SCALES = (0, 5, 3, 1, 2, 4)


def _move(x, axes, group=None):
    x = x.transpose(axes)
    if group is None:
        return x
    return x.reshape(*x.shape[: x.ndim - 3], 2, group)


def _rows_of(unit: jax.Array, d: int, is_v: int) -> Rows:
    """Inverse of `_lay_out_rows`."""
    lead = unit.shape[:-1]
    unit = unit.reshape(-1, unit.shape[-1])
    words = jax.lax.bitcast_convert_type(unit[:, : 32 * d].reshape(-1, 8 * d, 4), jnp.uint32)
    codes = formats.encode_e2m1(_decode_words(words))
    scales = from_e5m3(unit[:, 32 * d : 36 * d])
    if is_v:
        codes = codes.reshape(-1, d // 16, 8, 4, 2, 4, 2, 2).transpose(np.argsort(_V_CODES))
        scales = scales.reshape(-1, d // 16, 4, 4, 2, 2).transpose(np.argsort(_V_SCALES))
    else:
        codes = codes.reshape(-1, 4, d // 64, 8, 4, 2, 2, 8).transpose(np.argsort(_K_CODES))
        scales = scales.reshape(-1, 4, d // 64, 8, 4, 2).transpose(np.argsort(_K_SCALES))
    outer = unit[:, 36 * d :].reshape(-1, 8, 4, 2).transpose(0, 2, 3, 1)
    return Rows(
        codes.reshape(*lead, PAGE, d), scales.reshape(*lead, PAGE, -1), outer.reshape(*lead, PAGE)
    )


_FROM_E5M3 = np.zeros(256, np.uint8)
_FROM_E5M3[_E5M3] = np.arange(128)


def from_e5m3(scale_bytes: jax.Array) -> jax.Array:
    """Inverse of `to_e5m3`; bytes that it never makes become zero."""
    return jnp.asarray(_FROM_E5M3)[scale_bytes]


# --- BF16 ----------------------------------------------------------------------------------

# K: i, half, g, c, t, step, pair, 2 (dim 64 c + 16 t + 4 step + 2 pair + .).
_K_BF16 = (0, 1, 4, 6, 3, 5, 7, 2, 8)
_V_BF16 = (0, 5, 1, 7, 3, 2, 6, 4)


def _lay_out_bf16(x: jax.Array, is_v: int) -> jax.Array:
    lead, d = x.shape[:-2], x.shape[-1]
    if is_v:
        x = x.reshape(-1, 4, 2, 4, 2, d // 16, 2, 8).transpose(_V_BF16)
    else:
        x = x.reshape(-1, 4, 2, 8, d // 64, 4, 4, 2, 2).transpose(_K_BF16)
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*lead, -1)


def _bf16_of(unit: jax.Array, d: int, is_v: int) -> jax.Array:
    lead = unit.shape[:-1]
    x = jax.lax.bitcast_convert_type(unit.reshape(-1, PAGE * d, 2), jnp.bfloat16)
    if is_v:
        x = x.reshape(-1, d // 16, 4, 8, 4, 2, 2, 2).transpose(np.argsort(_V_BF16))
    else:
        x = x.reshape(-1, 4, d // 64, 4, 8, 4, 2, 2, 2).transpose(np.argsort(_K_BF16))
    return x.reshape(*lead, PAGE, d)
