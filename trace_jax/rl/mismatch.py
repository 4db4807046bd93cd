"""The mismatch ledger: how far the trainer's policy is from the one that sampled."""

import jax
import jax.numpy as jnp

from trace_jax.rl.corrections import recorded
from trace_jax.rl.losses import LOG_RATIO_LIMIT, log_difference, masked_mean


def logprob_ledger(logp_trainer, logp_rollout, mask, advantages):
    """Distances between two sets of log-probs of the same sampled tokens.

    The rollout is the sampling distribution: with r = p_trainer / p_rollout, the
    KL(rollout || trainer) estimators are k1 = mean(-log r) and k3 = mean(r - 1 -
    log r) (Schulman, "Approximating KL divergence").

    Args:
      logp_trainer: f32[N, T].
      logp_rollout: f32[N, T]; NaN where not recorded.
      mask: bool or f32 of 0 and 1, [N, T]; tool and padding tokens are 0.
      advantages: f32[N].

    Returns:
      dict of f32 scalars over the masked-in, recorded tokens, all 0 if there are
      none: gap_mean, gap_p99, gap_max (of |log r|); kl_k1; kl_k3; chi2, mean((r -
      1)^2); ess_share, (sum r)^2 / (n sum r^2); gap_q1 .. gap_q4, the mean gap in
      quarters of each row's own masked-in tokens; gap_positive, gap_negative, by
      the sign of the row's advantage; tokens; missing, masked-in tokens without a
      rollout log-prob. log r is clamped to +-20 inside exponentials only.

    Raises:
      ValueError: shapes that differ.
    """
    counted = recorded(logp_rollout, mask)
    signed = log_difference(logp_trainer, logp_rollout, counted)
    clamped = jnp.clip(signed, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    gap = jnp.abs(signed)
    tokens = jnp.sum(counted)
    ratio = jnp.where(counted, jnp.exp(clamped), 0.0)
    squares = jnp.maximum(jnp.sum(jnp.square(ratio)), jnp.finfo(jnp.float32).tiny)
    p99 = jnp.nanquantile(jnp.where(counted, gap, jnp.nan), 0.99)
    sign = jnp.sign(advantages)[:, None]
    ledger = {
        "gap_mean": masked_mean(gap, counted),
        "gap_p99": jnp.where(tokens > 0, p99, 0.0),
        "gap_max": jnp.max(gap),
        "kl_k1": masked_mean(-signed, counted),
        "kl_k3": masked_mean(jnp.expm1(clamped) - clamped, counted),
        "chi2": masked_mean(jnp.square(jnp.expm1(clamped)), counted),
        "ess_share": jnp.square(jnp.sum(ratio)) / (jnp.maximum(tokens, 1) * squares),
        "gap_positive": masked_mean(gap, counted & (sign > 0)),
        "gap_negative": masked_mean(gap, counted & (sign < 0)),
        "tokens": tokens,
        "missing": jnp.sum((mask != 0) & ~counted),
    }
    quarter = _quarters(mask != 0)
    for i in range(4):
        ledger[f"gap_q{i + 1}"] = masked_mean(gap, counted & (quarter == i))
    return {name: jax.lax.stop_gradient(x.astype(jnp.float32)) for name, x in ledger.items()}


def _quarters(mask):
    """int[N, T]: 0 to 3 for the masked-in tokens, by rank among those of their row."""
    length = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    rank = jnp.cumsum(mask, axis=1) - 1
    return (4 * rank) // length


def agreement(codes_a, codes_b, valid):
    """Share of equal codes a layer.

    Args:
      codes_a, codes_b: uint8[L, tokens, ...], one code an element (not packed). +0
        and -0 are different codes.
      valid: bool[tokens].

    Returns:
      f32[L]; 0 when no token is valid.

    Raises:
      ValueError: shapes that differ.
    """
    _check(codes_a, codes_b, valid, "codes")
    # Per token first: FP32 sums stay far below 2^24, where whole numbers end.
    per_token = jnp.mean(codes_a == codes_b, axis=tuple(range(2, codes_a.ndim)), dtype=jnp.float32)
    return _token_mean(per_token, jnp.broadcast_to(valid[None, :], per_token.shape))


def route_agreement(routes_a, routes_b, valid):
    """Share of tokens, a layer, that both sides send to the same SET of experts.

    Args:
      routes_a, routes_b: int[L, tokens, k], -1 where not recorded.
      valid: bool[tokens].

    Returns:
      f32[L] over valid tokens recorded on both sides; 0 when there are none.

    Raises:
      ValueError: shapes that differ.
    """
    _check(routes_a, routes_b, valid, "routes")
    known = jnp.all((routes_a >= 0) & (routes_b >= 0), axis=2)
    same = jnp.all(jnp.sort(routes_a, axis=2) == jnp.sort(routes_b, axis=2), axis=2)
    return _token_mean(same.astype(jnp.float32), known & valid[None, :])


def _token_mean(values, counted):
    """f32[L, tokens], bool[L, tokens] -> f32[L], 0 for a layer that counts no token."""
    total = jnp.sum(jnp.where(counted, values, 0.0), axis=1)
    return total / jnp.maximum(jnp.sum(counted, axis=1), 1)


def _check(a, b, valid, what: str) -> None:
    if a.shape != b.shape or a.shape[1:2] != valid.shape:
        raise ValueError(f"{what} {a.shape}, {b.shape} and valid {valid.shape} do not fit")
