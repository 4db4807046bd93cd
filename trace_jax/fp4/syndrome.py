"""Bits by their parity checks: a side that knows most of them needs few.

The trainer's values differ little from the rollout's, so nearly every bit that it would round to
is right. Which ones are wrong it does not know, but it knows which may be: those of values near a
rounding midpoint. The rollout sends r parity checks of a row's n bits (their syndrome under a
fixed random matrix). The trainer holds its own bits against them, takes the k values nearest to
a midpoint for unknown and solves the checks for them. This is Slepian and Wolf's coding with side
information at the decoder, by erasures of a random linear code; no position is sent.

k is r - SPARE, so that checks are left over: a row with a flip outside the k, or with
more of them than that, fails its checks in all but one of 2^SPARE cases: it is known.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

SPARE = 8  # checks beyond the unknowns
DEVIATIONS = 4.5  # of the number of doubtful values in a row, which its checks allow for
_WORD = 32


def checks_of(width: int, doubtful: float) -> int:
    """Checks of a row of `width` bits of which a share `doubtful` is near a midpoint.

    A multiple of 8; 0 where they would be no fewer than the bits, which then go themselves.
    """
    mean = doubtful * width
    needed = mean + DEVIATIONS * math.sqrt(mean * (1 - doubtful)) + SPARE
    checks = 8 * math.ceil(needed / 8)
    return checks if checks < 8 * math.ceil(width / 8) else 0


@functools.cache
def _matrix(width: int, checks: int) -> np.ndarray:
    """uint8 [width, checks] of 0 and 1. RandomState: its numbers are those of every NumPy."""
    return np.random.RandomState(width).randint(0, 2, (width, checks), np.uint8)


@functools.cache
def _packed_matrix(width: int, checks: int) -> np.ndarray:
    """uint32 [width, ceil(checks / 32)]: a value's checks as bits, low ones first."""
    bits = np.pad(_matrix(width, checks), [(0, 0), (0, -checks % _WORD)])
    return np.packbits(bits, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def _parities(bits: jax.Array, checks: int) -> jax.Array:
    """uint8 [..., checks] of bits [..., width]."""
    matrix = jnp.asarray(_matrix(bits.shape[-1], checks), jnp.bfloat16)
    # Sums are at most the width, which FP32 holds exactly.
    sums = jnp.dot(bits.astype(jnp.bfloat16), matrix, preferred_element_type=jnp.float32)
    return sums.astype(jnp.int32).astype(jnp.uint8) & 1


def syndrome(bits: jax.Array, checks: int) -> jax.Array:
    """uint8 [..., checks / 8]: the parity checks of bits (0 or 1) [..., width], low ones first."""
    return jnp.packbits(_parities(bits, checks), axis=-1, bitorder="little")


def recover(received: jax.Array, own: jax.Array, doubt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bits that `received` are the checks of, from bits that differ where in doubt.

    Args:
      received: uint8 [..., checks / 8], of `syndrome`.
      own: uint8 [..., width], 0 or 1.
      doubt: FP32 [..., width]; the smaller, the likelier is the bit wrong.

    Returns:
      bits uint8 [..., width], and whether all checks hold, bool [...]; where they do
      not, the bits are `own`.
    """
    lead, width = own.shape[:-1], own.shape[-1]
    received, own, doubt = (a.reshape(-1, a.shape[-1]) for a in (received, own, doubt))
    checks = 8 * received.shape[-1]
    unknown = min(checks - SPARE, width)
    wrong = jnp.unpackbits(received, axis=-1, bitorder="little") ^ _parities(own, checks)
    # Least doubt last: where columns depend on each other, the last keeps its own bit.
    at = jax.lax.top_k(-doubt, unknown)[1]
    columns = jnp.asarray(_packed_matrix(width, checks))[at]
    flips, holds = _solve(_planes(columns, checks), wrong.astype(bool), unknown)
    flips = flips & holds[:, None]
    row = jnp.arange(len(own))[:, None]
    bits = own.at[row, at].set(jnp.take_along_axis(own, at, axis=1) ^ flips.astype(own.dtype))
    return bits.reshape(*lead, width), holds.reshape(lead)


def _planes(columns: jax.Array, checks: int) -> list[jax.Array]:
    """Equations of 32 unknowns each, uint32 [rows, checks]: bit k is the plane's k-th unknown.

    columns: uint32 [rows, unknowns, words], the checks that each unknown is part of.
    """
    columns = jnp.pad(columns, [(0, 0), (0, -columns.shape[1] % _WORD), (0, 0)])
    bit = jnp.arange(_WORD, dtype=jnp.uint32)
    planes = []
    for first in range(0, columns.shape[1], _WORD):
        part = columns[:, first : first + _WORD, :, None] >> bit[None, None, None] & 1
        plane = jnp.sum(part << bit[None, :, None, None], axis=1, dtype=jnp.uint32)
        planes.append(plane.reshape(len(columns), -1)[:, :checks])
    return planes


def _solve(
    planes: list[jax.Array], right: jax.Array, unknowns: int
) -> tuple[jax.Array, jax.Array]:
    """Gauss-Jordan elimination over GF(2), plane by plane: those behind are done with.

    Args:
      planes: of `_planes`. right: bool [rows, checks], the equations' right side.

    Returns:
      bool [rows, unknowns], free unknowns False; bool [rows], whether every equation holds.
    """
    rows, checks = right.shape
    index, used, pivots = jnp.arange(checks)[None], jnp.zeros_like(right), []

    def eliminate(k, state):
        planes, right, used, pivots = state
        has = (planes[0] >> k.astype(jnp.uint32) & 1).astype(bool)
        pivot = jnp.min(jnp.where(has & ~used, index, checks), axis=1)  # none: `checks`
        chosen = index == pivot[:, None]
        others = has & ~chosen & (pivot < checks)[:, None]
        at = jnp.minimum(pivot, checks - 1)[:, None]
        add = lambda a: jnp.where(others, a ^ jnp.take_along_axis(a, at, axis=1), a)
        return tuple(map(add, planes)), add(right), used | chosen, pivots.at[k].set(pivot)

    planes = tuple(planes)
    while planes:
        found = jnp.zeros((min(_WORD, unknowns - _WORD * len(pivots)), rows), jnp.int32)
        state = (planes, right, used, found)
        planes, right, used, found = jax.lax.fori_loop(0, len(found), eliminate, state)
        planes, pivots = planes[1:], [*pivots, found]
    holds = ~jnp.any(right & ~used, axis=1)
    right = jnp.pad(right, ((0, 0), (0, 1)))  # a free unknown has no equation of its own
    return jnp.take_along_axis(right, jnp.concatenate(pivots).T, axis=1), holds
