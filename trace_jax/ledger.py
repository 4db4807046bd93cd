"""Code and route agreement between rollout and trainer, from the audit rows."""

from collections.abc import Mapping

import jax.numpy as jnp

from trace_jax.model import NOT_RECORDED
from trace_jax.model.sites import Codes
from trace_jax.rl.mismatch import agreement, route_agreement
from trace_jax.rollout import Rollout

NEGATIVE_ZERO = 8


def fed_tokens(rollout: Rollout) -> jnp.ndarray:
    """bool [N, S]: tokens that went through the rollout's layers (all but the last drawn)."""
    return jnp.arange(rollout.tokens.shape[1])[None] < (rollout.length - 1)[:, None]


def canonical(codes):
    """Codes with -0 read as +0: they stand for the same value."""
    return jnp.where(codes == NEGATIVE_ZERO, jnp.uint8(0), codes)


def code_ledger(
    rollout: Rollout,
    trainer: dict[str, Codes],
    live_routes,
    layers: Mapping[str, tuple[int, ...]] | None = None,
) -> dict:
    """Agreement by site and layer over the audit rows.

    Args:
      trainer: the trainer's codes of the same rows, from `Learner.audit`; sites that
        are BF16 there are absent and not compared.
      live_routes: int32 [layers, audit rows, S, slots], the live router's choice.
      layers: {site: layers that have it}, which the names count; None is all from 0 on.

    Returns:
      {"agreement/<site>/layer<l>", "agreement/mean", "routes/agreement/layer<l>",
      "guidance/unsolved" (share of rows whose parity checks do not hold)}: device scalars.
    """
    rows = live_routes.shape[1]
    valid = fed_tokens(rollout)[:rows].reshape(-1)

    def by_token(a):
        return a.reshape(a.shape[0], -1, *a.shape[3:])

    metrics, shares, unsolved = {}, [], []
    for site in sorted(set(trainer) & set(rollout.audit)):
        share = agreement(
            canonical(by_token(rollout.audit[site].codes)),
            canonical(by_token(trainer[site].codes)),
            valid,
        )
        names = range(len(share)) if layers is None else layers[site]
        metrics |= {f"agreement/{site}/layer{i}": s for i, s in zip(names, share, strict=True)}
        shares.append(jnp.mean(share))
        failed = (by_token(trainer[site].holds) == 0) & valid[None, :, None, None]
        rows_of = failed.size / valid.size  # of a token
        unsolved.append(jnp.sum(failed) / (rows_of * jnp.maximum(jnp.sum(valid), 1)))
    if shares:
        metrics["agreement/mean"] = jnp.mean(jnp.stack(shares))
        metrics["guidance/unsolved"] = jnp.mean(jnp.stack(unsolved))
    routes = rollout.routes[:, :rows].astype(jnp.int32)
    live = jnp.where(routes == NOT_RECORDED, NOT_RECORDED, live_routes)
    share = route_agreement(by_token(routes), by_token(live), valid)
    return metrics | {f"routes/agreement/layer{i}": s for i, s in enumerate(share)}
