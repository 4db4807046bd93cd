"""A batch as the loss consumes it, and the pieces that it is cut into."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trace_jax.model import Guidance
from trace_jax.model.moe import NOT_RECORDED
from trace_jax.rl.packing import Packing, pack_tokens, packed_window, places


class Batch(NamedTuple):
    """N rows as the loss consumes them; R is the response budget.

    Fields are [N, S] by token or [N, R] by response token; `routes` and guidance
    have layers first.
    """

    tokens: jax.Array  # int32 [N, S]
    valid: jax.Array  # bool [N, S]
    prompt_length: jax.Array  # int32 [N]
    mask: jax.Array  # bool [N, R]
    logp_rollout: jax.Array  # FP32 [N, R]
    advantages: jax.Array  # FP32 [N]
    weights: jax.Array  # FP32 [N, R], aggregation weights of the optimizer step
    old_logp: jax.Array | None  # FP32 [N, R]
    ref_logp: jax.Array | None  # FP32 [N, R]
    sampler: tuple[jax.Array, jax.Array] | None  # likeliest int32, log-probs FP32 [N, R, k]
    routes: jax.Array | None  # int32 [layers, N, S, top_k]
    guidance: Guidance | None
    guard: jax.Array | None  # FP32 [N, S]
    packing: Packing | None = None  # how the forward's rows hold the sequences


def response_window(x: jax.Array, prompt_length: jax.Array, width: int) -> jax.Array:
    """x [N, S, ...] at the response positions: [N, width, ...]; beyond S its end repeats."""
    at = prompt_length[:, None] + jnp.arange(width)[None]
    at = jnp.minimum(at, x.shape[1] - 1)
    return jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)


def forward_rows(batch: Batch, ways: int) -> dict:
    """What the forward takes of a batch: one sequence a row, or several where it is packed."""
    kept = {f: getattr(batch, f) for f in ("tokens", "valid", "guidance", "guard", "routes")}
    if batch.packing is None:
        return kept
    by_row = partial(pack_tokens, packing=batch.packing, ways=ways)
    where = places(batch.packing, batch.tokens.shape[1])
    guidance = batch.guidance
    if guidance is not None:
        sites = jax.tree.map(partial(by_row, axis=1), guidance.sites)
        guidance = guidance.replace(sites=sites, recorded=by_row(guidance.recorded, fill=False))
    return {
        "tokens": by_row(batch.tokens),
        "valid": where.segments > 0,
        "guidance": guidance,
        "guard": None if batch.guard is None else by_row(batch.guard),
        "routes": (
            None if batch.routes is None else by_row(batch.routes, axis=1, fill=NOT_RECORDED)
        ),
        "positions": where.positions,
        "segments": where.segments,
    }


def response_rows(x: jax.Array, batch: Batch, ways: int) -> jax.Array:
    """x [rows, width, ...] of the forward at the tokens before each response token: [N, R, ...]."""
    begin, width = batch.prompt_length - 1, batch.mask.shape[1]
    if batch.packing is None:
        return response_window(x, begin, width)
    return packed_window(x, batch.packing, begin, width, ways)


def take(batch: Batch, cut) -> Batch:
    """Applies cut(array, axis of N) to every array of a batch."""
    rows = lambda tree: jax.tree.map(lambda a: cut(a, 0), tree)
    layers = lambda tree: jax.tree.map(lambda a: cut(a, 1), tree)
    fields = {f: rows(getattr(batch, f)) for f in Batch._fields if f not in ("routes", "guidance")}
    guidance = batch.guidance
    if guidance is not None:
        guidance = Guidance(
            layers(guidance.sites), cut(guidance.recorded, 0), cut(guidance.version, 0)
        )
    return Batch(**fields, routes=layers(batch.routes), guidance=guidance)


def split(batch: Batch, parts: int, ways: int) -> Batch:
    """Cuts N into `parts` pieces on a new leading axis; groups stay whole.

    Each piece takes a run of the rows of each of `ways` devices, so that none moves.
    """

    def cut(a, axis):
        size = a.shape[axis] // (ways * parts)
        a = a.reshape(*a.shape[:axis], ways, parts, size, *a.shape[axis + 1 :])
        a = jnp.moveaxis(a, axis + 1, 0)
        return a.reshape(*a.shape[: axis + 1], ways * size, *a.shape[axis + 3 :])

    return take(batch, cut)


def merge(pieces: jax.Array, ways: int) -> jax.Array:
    """[parts, n, ...] as `split` cuts it, back to [N, ...] in the order of the batch."""
    parts, rows, *rest = pieces.shape
    pieces = pieces.reshape(parts, ways, rows // ways, *rest)
    return jnp.moveaxis(pieces, 0, 1).reshape(parts * rows, *rest)


COUNTS = ("tokens", "missing", "dropped_sequences", "skipped")


def join(metrics: dict) -> dict:
    """Joins metrics [parts] of micro- or minibatches: token-weighted means, maxima, counts."""
    tokens = metrics["tokens"]
    share = tokens / jnp.maximum(jnp.sum(tokens), 1.0)
    joined = {}
    for name, value in metrics.items():
        if name.endswith(COUNTS):
            joined[name] = jnp.sum(value)
        elif name.endswith("_max"):
            joined[name] = jnp.max(value)
        else:
            joined[name] = jnp.sum(value * share)
    return joined
