"""Sequence packing: several short sequences share a row of the learner's forward.

Only the forward is packed. What the loss takes (masks, log-probs, advantages, weights) stays
one row a sequence, so that means, groups and clipping are those of the unpacked batch.

Rows of a batch come in pieces: those that one device has of one micro-batch. A piece is
packed by itself, and all pieces into equally many rows; so no token changes its device, and
no sequence its optimizer step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = 16  # numbers of rows that a batch can be packed into: each compiles once


class Packing(NamedTuple):
    """Where N sequences of S tokens stand in M rows of W cells.

    `source` int32 [M, W]: what each cell holds, sequence of the piece * S + token, or -1 for
    nothing. `first` int32 [N]: the cell of each sequence's first token, row of the piece * W
    + place. The pieces' rows are in the order of the batch's.
    """

    source: jax.Array
    first: jax.Array


def pack(lengths: np.ndarray, length: int, width: int, pieces: int) -> Packing:
    """Packs sequences first fit, longest first; nothing is cut and nothing left out.

    Args:
      lengths: int [N], tokens of each sequence. length: S.
      width: W, cells of a row.
      pieces: parts of N that are packed by themselves.

    Raises:
      ValueError: a sequence that is longer than a row.
    """
    longest = int(lengths.max(initial=0))
    if longest > width:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit into rows of {width}; write "
            f"rl.pack_length={longest} or more"
        )
    parts = lengths.reshape(pieces, -1)
    placed = [_first_fit(part, width) for part in parts]
    most = -(-parts.shape[1] // max(width // length, 1))  # rows, were all sequences of S tokens
    step = -(-most // SHAPES)
    rows = -(-(1 + max(int(row.max()) for row, _ in placed)) // step) * step
    source = np.full((pieces, rows, width), -1, np.int32)
    for piece, (row, start) in enumerate(placed):
        for i, (r, s, n) in enumerate(zip(row, start, parts[piece], strict=True)):
            source[piece, r, s : s + n] = i * length + np.arange(n)
    first = np.concatenate([row * width + start for row, start in placed])
    return Packing(source.reshape(-1, width), first.astype(np.int32))


def _first_fit(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and place int [n] of each sequence."""
    free = np.full(len(lengths), width)
    row, start = np.zeros((2, len(lengths)), int)
    for i in np.argsort(-lengths, kind="stable"):
        row[i] = np.argmax(free >= lengths[i])
        start[i] = width - free[row[i]]
        free[row[i]] -= lengths[i]
    return row, start


def packing_counts(packing: Packing, lengths: np.ndarray, length: int) -> dict[str, float]:
    """Rows, tokens, and the share of cells without a token, in rows of `length` and packed."""
    tokens, cells = int((packing.source >= 0).sum()), packing.source.size
    return {
        "rows": len(packing.source),
        "tokens": tokens,
        "padding_before": 1 - int(lengths.sum()) / (lengths.size * length),
        "padding_after": 1 - tokens / cells,
    }


class Places(NamedTuple):
    """int32 [M, W] of packed rows: the token's position in its sequence, and which sequence of
    the piece it is of, from 1; 0 for cells that hold nothing."""

    positions: jax.Array
    segments: jax.Array


def places(packing: Packing, length: int) -> Places:
    inside = packing.source >= 0
    return Places(
        jnp.where(inside, packing.source % length, 0),
        jnp.where(inside, packing.source // length + 1, 0),
    )


def pack_tokens(x: jax.Array, packing: Packing, ways: int, axis: int = 0, fill=0) -> jax.Array:
    """x with axes [N, S] at `axis` as [M, W]; empty cells get `fill`."""
    lead, rest = x.shape[:axis], x.shape[axis + 2 :]
    flat = x.reshape(*lead, ways, -1, *rest)
    at = packing.source.reshape(*(1,) * axis, ways, -1, *(1,) * len(rest))
    taken = jnp.take_along_axis(flat, jnp.maximum(at, 0), axis=axis + 1)
    taken = jnp.where(at >= 0, taken, jnp.asarray(fill, x.dtype))
    return taken.reshape(*lead, *packing.source.shape, *rest)


def packed_window(x: jax.Array, packing: Packing, begin: jax.Array, width: int, ways: int):
    """Of packed x [M, W, ...] the cells of each sequence from its token `begin` int32 [N] on.

    Returns [N, width, ...]; beyond the row's end its last cell repeats.
    """
    count, rest = packing.first.shape[0], x.shape[2:]
    flat = x.reshape(ways, -1, *rest)
    at = (packing.first + begin)[:, None] + jnp.arange(width)[None]
    at = jnp.minimum(at.reshape(ways, -1), flat.shape[1] - 1)
    taken = jnp.take_along_axis(flat, at.reshape(*at.shape, *(1,) * len(rest)), axis=1)
    return taken.reshape(count, width, *rest)
