"""Keys and values in pages: where a decode program appends and what it attends to.

A pool holds pages of tokens of one layer; a table names the pages of each sequence, in
order. `KVPlane` pools take any format and run anywhere; `KVPages` pools hold the layout
of the GPU and TPU kernels. Either way what is attended to is what was stored.
"""

import jax
import jax.numpy as jnp
from flax import struct

from trace_jax.fp4 import FP8, E4M3Rows, Format, LayerPrecision
from trace_jax.kernels import kv_attention, kv_pages
from trace_jax.kernels.kv_append import append
from trace_jax.kernels.kv_pages import KVPages
from trace_jax.kernels.kv_units import KV_FORMAT
from trace_jax.model.attention import Recent, attend, recent_of, visible
from trace_jax.model.config import ModelConfig
from trace_jax.model.kv_planes import KVPlane, decode_rows, empty_planes, quantize_rows
from trace_jax.model.sites import Sites


def empty_pool(
    config: ModelConfig, precision: LayerPrecision, pages: int, page: int, kernel: bool
) -> dict[str, KVPlane] | KVPages:
    """An empty pool of one layer.

    Args:
      pages, page: pages, and tokens of each.
      kernel: in the kernels' layout.

    Raises:
      ValueError: attention that has no pages; formats, page or head size that the kernels'
        layout does not take.
    """
    if config.latent.kv_rank or config.full_attention_every != 1:
        raise ValueError(
            "KV pages hold keys and values of grouped queries in every layer; write an engine "
            "without pages (rollout.Engine) for latent or linear attention"
        )
    if not kernel:
        shape = (pages, page, config.num_kv_heads)
        widths = dict.fromkeys("kv", config.head_dim)
        return empty_planes(shape, widths, precision, config.dtype)
    reason = kernel_refusal(config, precision, page)
    if reason is not None:
        raise ValueError(f"KV pages: {reason}")
    kind = _kind(precision.k)
    return kv_pages.new_pages(pages, config.num_kv_heads, config.head_dim, kind)


def kernel_refusal(config: ModelConfig, precision: LayerPrecision, page: int) -> str | None:
    """Why the kernels' layout cannot hold a layer's keys and values; None if it can."""
    if precision.k != precision.v:
        return "the kernels take one format for keys and values"
    if _kind(precision.k) is None:
        return f"the kernels take NVFP4, FP8 or BF16, not {precision.k.name}"
    if precision.kv_window:
        return (
            "the kernels' pages keep no BF16 tokens that sequences could share or take along "
            f"when they are preempted (kv_window is {precision.kv_window})"
        )
    if page != kv_pages.PAGE:
        return f"the kernels take pages of {kv_pages.PAGE} tokens, not {page}"
    if config.head_dim not in (64, 128, 256):
        return f"the kernels take head sizes of 64, 128 or 256, not {config.head_dim}"
    if config.dtype != "bfloat16":
        return f"the kernels take BF16 activations, not {config.dtype}"
    return None


def _kind(fmt: Format | E4M3Rows | None) -> str | None:
    """The kernels' name of a format; None if they have none."""
    if fmt is None or fmt == FP8:
        return "bf16" if fmt is None else "fp8"
    return "nvfp4" if fmt.replace(name=KV_FORMAT.name) == KV_FORMAT else None


@struct.dataclass
class Pages:
    """Where the tokens of a forward stand in pages.

    Attributes:
      table: int32 [B, pages a sequence]; entries past what a sequence has are valid ids.
      valid: bool [B, S]; other tokens are not stored.
    """

    table: jax.Array
    valid: jax.Array

    def step(self, q, k, v, pool, positions, sites: Sites, window, sinks):
        """Stores the new keys and values and attends to all that a sequence has.

        Args:
          q, k, v: [B, S, heads, head_dim], rotated, not quantized.
          pool: of this layer.
          positions: int32 [B, S]. With S above 1 and a kernel pool consecutive, from the
            start of a page on.
          sites: quantize and record K and V.
          window: keys a query sees; 0 or None is all. A kernel pool takes a number.
          sinks: FP32 [heads] or None.

        Returns:
          [B, S, heads * head_dim] in q's dtype, and the pool.
        """
        if isinstance(pool, KVPages) and q.shape[1] == 1:
            return self._decode(q, k, v, pool, positions, sites, window, sinks)
        if isinstance(pool, KVPages):
            k, v = self._record(k, v, sites)
            pool = _write_whole_pages(pool, self, positions, k, v)
            k, v = kv_pages.read_pages(pool, self.table)  # [B, pages, kv_heads, page, head_dim]
            k, v = (x.swapaxes(2, 3) for x in (k, v))
            k, v = (x.reshape(x.shape[0], -1, *x.shape[3:]).astype(q.dtype) for x in (k, v))
            return self._attend(q, k, v, positions, window, sinks), pool
        rows, planes = quantize_rows(k, v, sites)
        pool = {name: _write(pool[name], new, self, positions) for name, new in planes.items()}
        stored = {name: _of_sequence(plane, self.table) for name, plane in pool.items()}
        rows = decode_rows(stored, rows, sites.spec.precision)
        keys = jnp.arange(rows["k"].shape[1])[None]
        recent = recent_of(rows, positions, keys, sites.spec.precision.kv_window)
        return self._attend(q, rows["k"], rows["v"], positions, window, sinks, recent), pool

    def _attend(self, q, k, v, positions, window, sinks, recent: Recent | None = None):
        # A query that does not exist must not make slots count that were never written.
        mask = visible(positions, jnp.arange(k.shape[1])[None], window) & self.valid[:, :, None]
        return attend(q, k, v, mask, sinks, recent=recent)

    def _record(self, k, v, sites: Sites):
        """Keys and values as the engine's noise leaves them; their codes go to the record."""
        k, v = sites.perturb("k", k), sites.perturb("v", v)
        sites.encode("k", k), sites.encode("v", v)
        return k, v

    def _decode(self, q, k, v, pool, positions, sites: Sites, window, sinks):
        """One token a sequence, by the kernels."""
        bits = {name: sites.record_bits(name) for name in "kv"}
        if sites.spec.audit_rows:  # whole codes, for the ledger
            k, v = self._record(k, v, sites)
            bits = {"k": None, "v": None}
        else:
            k, v = sites.perturb("k", k), sites.perturb("v", v)
        wanted = next((b for b in bits.values() if b is not None), None)
        at = jnp.where(self.valid, positions, -1)[:, 0]
        pool, *left = append(pool, self.table, at, k[:, 0], v[:, 0], record=wanted)
        for name, guidance in zip("kv", left, strict=True):
            if bits[name] is not None:
                sites.keep(name, jax.tree.map(lambda a: a[:, None], guidance))
        out = kv_attention.paged_attention(
            q[:, 0],
            pool,
            self.table,
            at + 1,
            scale=q.shape[-1] ** -0.5,
            window=window or None,
            sink=sinks,
        )
        return out.reshape(out.shape[0], 1, -1), pool


def _write(plane: KVPlane, new: KVPlane, where: Pages, positions) -> KVPlane:
    """`new` [B, S, ...] into its pages; what is not valid goes nowhere."""
    pages, page = plane.data.shape[:2]
    index = jnp.minimum(positions // page, where.table.shape[1] - 1)
    ids = jnp.where(where.valid, jnp.take_along_axis(where.table, index, axis=1), pages)
    put = lambda old, x: old.at[ids, positions % page].set(x, mode="drop")
    return jax.tree.map(put, plane, new)


def _of_sequence(plane: KVPlane, table) -> KVPlane:
    """[B, pages a sequence * page, ...]: each sequence's tokens in order."""
    read = lambda a: a[table].reshape(table.shape[0], -1, *a.shape[2:])
    return jax.tree.map(read, plane)


def _write_whole_pages(pool: KVPages, where: Pages, positions, k, v) -> KVPages:
    batch, length = positions.shape
    span = length // kv_pages.PAGE
    first = positions[:, 0] // kv_pages.PAGE
    index = first[:, None] + jnp.arange(span)[None]
    ids = jnp.take_along_axis(where.table, jnp.minimum(index, where.table.shape[1] - 1), axis=1)
    used = jnp.any(where.valid.reshape(batch, span, kv_pages.PAGE), axis=-1)
    ids = jnp.where(used, ids, pool.data.shape[0]).reshape(-1)
    pages = lambda x: x.reshape(batch * span, kv_pages.PAGE, *x.shape[2:])
    return kv_pages.write_pages(pool, ids, pages(k), pages(v))
