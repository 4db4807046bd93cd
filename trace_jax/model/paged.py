"""Keys and values in pages: where a decode program appends and what it attends to.

A pool holds pages of tokens of one layer; a table names the pages of each sequence, in
order. What is attended to is what was stored, but for the tokens of a `kv_window`.
"""

import jax
import jax.numpy as jnp
from flax import struct

from trace_jax.kernels import kv_attention, kv_pages
from trace_jax.kernels.decode_attention import Heads, decode_attention
from trace_jax.kernels.kv_append import append
from trace_jax.kernels.kv_pages import KVPages
from trace_jax.kernels.kv_recent import append_recent
from trace_jax.model import recent
from trace_jax.model.attention import Remembered, attend, recent_of, visible
from trace_jax.model.kv_planes import KVPlane, decode_rows, quantize_rows
from trace_jax.model.pools import Stored
from trace_jax.model.sites import Sites


@struct.dataclass
class Pages:
    """Where the tokens of a forward stand in pages.

    Attributes:
      table: int32 [B, pages a sequence]; entries past what a sequence has are valid ids.
      valid: bool [B, S]; other tokens are not stored.
      resumed: states of linear attention stand for the tokens before these, whatever their
        positions. Else they count as empty before position 0, and looking that up costs a pass
        over all of them.
    """

    table: jax.Array
    valid: jax.Array
    resumed: bool = struct.field(pytree_node=False, default=False)

    def step(self, q, k, v, stored: Stored, positions, sites: Sites, window, sinks):
        """Stores the new keys and values and attends to all that a sequence has.

        Args:
          q, k, v: [B, S, heads, head_dim], rotated, not quantized.
          stored: of this layer.
          positions: int32 [B, S], consecutive. With S above 1 and a kernel pool from the
            start of a page on.
          sites: quantize and record K and V.
          window: keys a query sees; 0 or None is all. A kernel pool takes a number.
          sinks: FP32 [heads] or None.

        Returns:
          [B, S, heads * head_dim] in q's dtype, and what is stored now.
        """
        if isinstance(stored.pages, KVPages) and q.shape[1] == 1:
            return self._decode(q, k, v, stored, positions, sites, window, sinks)
        k, v, mask, near, stored = self.remember(k, v, stored, positions, sites, window)
        return attend(q, k, v, mask, sinks, recent=near), stored

    def remember(self, k, v, stored: Stored, positions, sites: Sites, window=None) -> Remembered:
        """Stores new keys and values: `attention.remember` for pages; arguments as for `step`."""
        pool, state = stored
        if isinstance(pool, KVPages):
            k, v = self._record(k, v, sites)
            new = {"k": k, "v": v}
            pool = _write_whole_pages(pool, self, positions, k, v)
            rows = _rows_of_kernel(pool, self.table, k.dtype)
        else:
            rows, planes = quantize_rows(k, v, sites)
            pool = {s: _write(pool[s], planes[s], self, positions) for s in "kv"}
            new = {s: rows.get(f"recent_{s}") for s in "kv"}
            planes = {s: _of_sequence(plane, self.table) for s, plane in pool.items()}
            rows = decode_rows(planes, rows, sites.spec.precision)
        length, kv_window = rows["k"].shape[1], sites.spec.precision.kv_window
        if kv_window:
            rows |= recent.by_position(state, new, positions, self.valid, length)
            state = recent.pushed(state, new, positions, self.valid)
        keys = jnp.arange(length)[None]
        # A query that does not exist must not make slots count that were never written.
        mask = visible(positions, keys, window) & self.valid[:, :, None]
        near = recent_of(rows, positions, keys, kv_window)
        return Remembered(rows["k"], rows["v"], mask, near, Stored(pool, state))

    def _record(self, k, v, sites: Sites):
        """Keys and values as the engine's noise leaves them; their codes go to the record."""
        k, v = sites.perturb("k", k), sites.perturb("v", v)
        sites.encode("k", k), sites.encode("v", v)
        return k, v

    def takes_projection(self, stored: Stored, sites: Sites) -> bool:
        """Whether `step_from_projection` does all that a decode step asks for."""
        plain = sites.inputs.noise_key is None and not sites.spec.audit_rows
        plain = plain and not sites.spec.precision.rotate_v and stored.state is None
        return plain and isinstance(stored.pages, KVPages)

    def step_from_projection(
        self, projected, heads: Heads, eps, stored: Stored, positions, sites: Sites, window, sinks
    ):
        """`step` of one token a sequence from its FP32 projection on, by one kernel call.

        Args:
          projected: FP32 [B, all heads * head_dim]: queries, keys, values.
          heads, eps: norms and rotation of queries and keys.
        """
        out, pool, *left = decode_attention(
            projected,
            heads,
            stored.pages,
            self.table,
            self._at(positions) + 1,
            eps=eps,
            scale=stored.pages.head_size**-0.5,
            window=window or None,
            sink=sinks,
            record=_wanted(sites),
        )
        _keep(sites, left)
        return out.reshape(out.shape[0], 1, -1), stored._replace(pages=pool)

    def _at(self, positions):
        """int32 [B]: where each sequence's one token goes; -1 for none."""
        return jnp.where(self.valid, positions, -1)[:, 0]

    def _decode(self, q, k, v, stored: Stored, positions, sites: Sites, window, sinks):
        """One token a sequence, by the kernels."""
        pool, rings = stored
        whole = bool(sites.spec.audit_rows)  # codes, for the ledger
        if whole:
            k, v = self._record(k, v, sites)
        else:
            k, v = sites.perturb("k", k), sites.perturb("v", v)
        wanted = None if whole else _wanted(sites)
        at = self._at(positions)
        pool, *left = append(pool, self.table, at, k[:, 0], v[:, 0], record=wanted)
        if rings is not None:
            rings = append_recent(rings, at, k[:, 0], v[:, 0])
        if not whole:
            _keep(sites, left)
        out = kv_attention.paged_attention(
            q[:, 0],
            pool,
            self.table,
            at + 1,
            scale=q.shape[-1] ** -0.5,
            window=window or None,
            sink=sinks,
            recent=rings,
        )
        return out.reshape(out.shape[0], 1, -1), Stored(pool, rings)


def _wanted(sites: Sites) -> int | None:
    """Bits a value that keys and values are to be recorded with; None where neither is."""
    bits = (sites.record_bits(name) for name in "kv")
    return next((b for b in bits if b is not None), None)


def _keep(sites: Sites, left) -> None:
    """Keeps what kernels left of keys and values, [B, heads, ...], as far as it is recorded."""
    for name, guidance in zip("kv", left, strict=True):
        if sites.record_bits(name) is not None:
            sites.keep(name, jax.tree.map(lambda a: a[:, None], guidance))


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


def _rows_of_kernel(pool: KVPages, table, dtype):
    """{"k", "v"} [B, pages a sequence * page, heads, head_dim]: as `_of_sequence`."""
    pages = kv_pages.read_pages(pool, table)  # [B, pages, kv_heads, page, head_dim]
    k, v = (x.swapaxes(2, 3) for x in pages)
    k, v = (x.reshape(x.shape[0], -1, *x.shape[3:]).astype(dtype) for x in (k, v))
    return {"k": k, "v": v}


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
