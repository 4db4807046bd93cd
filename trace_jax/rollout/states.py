"""States of sequences: rings of recent tokens and what linear attention carries on.

Leaves lead with the sequences, `count` of them; a ring in the kernels' layout takes several
entries of that axis.
"""

import jax
import jax.numpy as jnp


def read(states, rows: jax.Array, count: int):
    """The states of sequences int32 [n], in their order; numbers beyond the end give any."""

    def one(a):
        by_row = a.reshape(count, -1, *a.shape[1:])
        return by_row[jnp.minimum(rows, count - 1)].reshape(-1, *a.shape[1:])

    return jax.tree.map(one, states)


def cleared(states, where: jax.Array):
    """`states` of sequences with an entry each, empty `where` bool [count] says so."""
    return jax.tree.map(lambda a: jnp.where(where.reshape(-1, *(1,) * (a.ndim - 1)), 0, a), states)


def write(states, rows: jax.Array, new, count: int):
    """`states` with those of sequences int32 [n] replaced by `new`; beyond the end: dropped."""

    def one(a, b):
        by_row, parts = (x.reshape(n, -1, *x.shape[1:]) for x, n in ((a, count), (b, rows.size)))
        return by_row.at[rows].set(parts, mode="drop").reshape(a.shape)

    return jax.tree.map(one, states, new)
