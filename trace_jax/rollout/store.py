"""Where records are kept: one row a request, aligned by token.

A dispatch leaves its records in its own small buffers, by step and slot. They go from
there to (row, position) in one scatter: on the device, where the learner reads them in
place, or on the host, which they reach while the next dispatch runs. A token that is
computed again lands in the same place, and a token of a shared prompt is computed once
and copied.
"""

from collections.abc import Sequence as Sequences
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from trace_jax.model import NOT_RECORDED
from trace_jax.model.specs import Guidance, Record
from trace_jax.rollout.record import Rollout
from trace_jax.rollout.sequence import Sequence


@struct.dataclass
class Store:
    """N requests of up to S tokens.

    Attributes:
      record: Record with leaves [layers, N (audit: audit rows), S, ...]; routes are int16 and
        NOT_RECORDED where there is none.
      recorded: bool [N, S].
    """

    record: Record
    recorded: Any


def empty_store(like: Record, rows: int, length: int, audit_rows: int, host: bool) -> Store:
    """A store for records such as `like`, whose leaves are [layers, R, S, ...]."""
    xp = np if host else jnp

    def wide(count):
        return lambda a: xp.zeros((a.shape[0], count, length, *a.shape[3:]), a.dtype)

    routes = (like.routes.shape[0], rows, length, *like.routes.shape[3:])
    record = Record(
        jax.tree.map(wide(rows), like.sites),
        jax.tree.map(wide(audit_rows), like.audit),
        xp.full(routes, NOT_RECORDED, jnp.int16),
    )
    return Store(record, xp.zeros((rows, length), bool))


def steps_record(record: Record) -> Record:
    """The record of decode steps, leaves [K, layers, B, ...], as [layers, K, B, ...]."""
    return jax.tree.map(lambda a: a.swapaxes(0, 1), record)


def commit(store: Store, record: Record, rows, positions, audit_rows: int) -> Store:
    """Puts records where they belong.

    Args:
      store: given up; use the result.
      record: leaves [layers, X, Y, ...]. The audit may have fewer of the axis that counts
        slots: the first ones.
      rows, positions: int32 [X, Y]; a row beyond the store goes nowhere.
      audit_rows: rows whose whole codes are kept.
    """
    put = _put_on_host if isinstance(store.recorded, np.ndarray) else _put

    def put_audit(old, new):
        x, y = new.shape[1:3]
        where = rows[:x, :y]
        outside = (jnp if put is _put else np).where(where < audit_rows, where, old.shape[1])
        return put(old, new, outside, positions[:x, :y])

    kept = Record(
        jax.tree.map(lambda o, n: put(o, n, rows, positions), store.record.sites, record.sites),
        jax.tree.map(put_audit, store.record.audit, record.audit),
        put(store.record.routes, record.routes, rows, positions),
    )
    one = np.ones((1, *rows.shape), bool)
    return Store(kept, put(store.recorded[None], one, rows, positions)[0])


def _put(old, new, rows, positions):
    return old.at[:, rows, positions].set(new.astype(old.dtype), mode="drop")


def _put_on_host(old, new, rows, positions):
    inside = rows < old.shape[1]
    old[:, rows[inside], positions[inside]] = new[:, inside]
    return old


def copy_rows(store: Store, source, target, tokens) -> Store:
    """The first `tokens` int32 [n] of rows `source` to rows `target`; beyond the end: dropped."""
    if isinstance(store.recorded, np.ndarray):
        for a, b, n in zip(source, target, tokens, strict=True):
            for leaf in jax.tree.leaves(store.record):
                if b < leaf.shape[1]:
                    leaf[:, b, :n] = leaf[:, a, :n]
            if b < store.recorded.shape[0]:
                store.recorded[b, :n] = store.recorded[a, :n]
        return store

    def copy(a):
        inside = jnp.arange(a.shape[2])[None] < tokens[:, None]
        inside = inside.reshape(1, *inside.shape, *(1,) * (a.ndim - 3))
        new = jnp.where(inside, a[:, source], a.at[:, target].get(mode="fill", fill_value=0))
        return a.at[:, target].set(new, mode="drop")

    return Store(jax.tree.map(copy, store.record), copy(store.recorded[None])[0])


def rollout_of(
    store: Store, sequences: Sequences[Sequence], length: int, version: int, copy: bool
) -> Rollout:
    """The records of `sequences`, in their order, up to `length` tokens, as a Rollout.

    Without a `copy` it may share the store's buffers.
    """
    rows = np.asarray([s.row for s in sequences])
    everything = len(rows) == len(store.recorded) and (rows == np.arange(len(rows))).all()

    def cut(a):
        a = a if everything else a[:, rows[: a.shape[1]]]
        return jnp.array(a[:, :, :length], copy=copy)

    wide = lambda rows, dtype: _padded(rows, length, dtype)
    ends = jnp.asarray([len(s.tokens) - 1 for s in sequences], jnp.int32)  # never fed
    return Rollout(
        tokens=wide([s.tokens for s in sequences], np.int32),
        prompt_length=jnp.asarray([s.prompt for s in sequences], jnp.int32),
        length=ends + 1,
        logp=wide([s.logp for s in sequences], np.float32),
        mask=wide([s.sampled for s in sequences], bool),
        finished=jnp.asarray([s.done in ("eos", "stop") for s in sequences]),
        guidance=Guidance(
            jax.tree.map(cut, store.record.sites),
            cut(store.recorded[None])[0] & (jnp.arange(length)[None] < ends[:, None]),
            jnp.full(len(sequences), version, jnp.int32),
        ),
        routes=cut(store.record.routes),
        audit=jax.tree.map(cut, store.record.audit),
    )


def _padded(rows, length: int, dtype) -> jax.Array:
    out = np.zeros((len(rows), length), dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return jnp.asarray(out)
