"""A pool of paged K and V: 64 tokens of one KV head a page, in the form that attention reads.

Kinds of pages: "nvfp4" (rows quantized along the head size, E4M3 block scales and a power-of-two
outer scale a token and head: 4.6 bits a value), "fp8" (E4M3 with such an outer scale: 8.1 bits),
"bf16". One token a sequence is added by kv_append.append.
"""

import jax
import jax.numpy as jnp
from flax import struct

from trace_jax.kernels import dispatch, kv_attention_tpu, kv_rows, kv_units, triton_call
from trace_jax.kernels.bits import to_e5m3
from trace_jax.kernels.kv_units import KINDS, PAGE, Fields


@struct.dataclass
class KVPages:
    """A pool of pages.

    Attributes:
      data: uint8 [pages, kv_heads, 2 (K, V), unit bytes]; with layout "tpu" the codes, see
        kv_attention_tpu.
      head_size, kind: static; kind is "nvfp4", "fp8" or "bf16".
      scales, exponents: None, or the other two arrays of layout "tpu".
      layout: static, "hopper", "triton" (kv_rows) or "tpu" (NVFP4 only).
    """

    data: jax.Array
    head_size: int = struct.field(pytree_node=False)
    kind: str = struct.field(pytree_node=False)
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

    def with_arrays(self, arrays) -> "KVPages":
        return self.replace(data=arrays[0], scales=arrays[1], exponents=arrays[2])


def new_pages(
    num_pages: int, kv_heads: int, head_size: int, kind: str = "nvfp4", layout: str = "auto"
) -> KVPages:
    """An empty pool.

    Args:
      kind: "nvfp4", "fp8" or "bf16".
      layout: "hopper", "triton", "tpu", or "auto": "tpu" for NVFP4 on a TPU, "triton" on a GPU
        that is no Hopper, else "hopper".

    Raises:
      ValueError: a head size other than 64, 128 or 256; an unknown kind; a layout that does
        not hold it.
    """
    if head_size not in (64, 128, 256):
        raise ValueError(f"KV pages: head size {head_size}; pages take 64, 128 or 256")
    if kind not in KINDS:
        raise ValueError(f"KV pages: kind {kind!r}; write one of {', '.join(KINDS)}")
    if layout == "auto":
        tpu = kind == "nvfp4" and dispatch.platform() == "tpu"
        layout = "tpu" if tpu else triton_call.gpu_layout()
    if layout in ("hopper", "triton"):
        shape = (num_pages, kv_heads, 2, kv_units.unit_bytes(head_size, kind))
        return KVPages(jnp.zeros(shape, jnp.uint8), head_size, kind, layout=layout)
    if layout != "tpu" or kind != "nvfp4":
        raise ValueError(
            f"KV pages: layout {layout!r} for {kind}; write auto, hopper, triton, or tpu for nvfp4"
        )
    rows = (kv_heads * head_size // 2, kv_heads * head_size // 16, kv_heads)
    codes, scales, exponents = (jnp.zeros((num_pages, r, 2 * PAGE), jnp.uint8) for r in rows)
    return KVPages(codes, head_size, kind, scales, exponents, "tpu")


def write_pages(pages: KVPages, ids: jax.Array, k: jax.Array, v: jax.Array) -> KVPages:
    """Stores whole pages: k, v [n, 64, kv_heads, D] (BF16) at page ids int32 [n].

    Ids beyond the pool are dropped. Slots of tokens that do not exist yet may hold anything.
    """
    k, v = (x.astype(jnp.bfloat16).transpose(0, 2, 1, 3) for x in (k, v))
    if pages.layout == "tpu":
        new = kv_attention_tpu.pages_of(columns(k), columns(v))
        return pages.with_arrays(
            [a.at[ids].set(n, mode="drop") for a, n in zip(pages.arrays, new, strict=True)]
        )
    units = [units_of(pages, kv_units.encode(x, pages.kind), i) for i, x in enumerate((k, v))]
    return pages.replace(data=pages.data.at[ids].set(jnp.stack(units, axis=2), mode="drop"))


def read_pages(pages: KVPages, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V of pages ids int32 [...]: FP32 [..., kv_heads, 64, D]; the plain-XLA way in."""
    if pages.layout == "tpu":
        arrays = [a[ids] for a in pages.arrays]
        return kv_attention_tpu.read(arrays, pages.kv_heads, pages.head_size)
    data = pages.data[ids]
    k, v = (
        kv_units.decode(fields_of(pages, data[..., is_v, :], is_v), pages.kind) for is_v in range(2)
    )
    return k, v


def units_of(pages: KVPages, fields: Fields, is_v: int) -> jax.Array:
    """Fields [..., 64, n] as units uint8 [..., bytes] of K or of V in the pool's layout."""
    if pages.layout == "triton":
        return kv_rows.lay_out(fields, pages.kind)
    return kv_units.lay_out(fields, pages.kind, is_v)


def fields_of(pages: KVPages, units: jax.Array, is_v: int) -> Fields:
    """Inverse of `units_of`."""
    if pages.layout == "triton":
        return kv_rows.fields_of(units, pages.kind, pages.head_size)
    return kv_units.fields_of(units, pages.kind, pages.head_size, is_v)


def columns(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows [..., D] as the byte columns of layout "tpu"."""
    codes, scales, exponents = kv_units.encode(x, "nvfp4")
    return kv_attention_tpu.columns(codes, to_e5m3(scales), exponents[..., 0])
