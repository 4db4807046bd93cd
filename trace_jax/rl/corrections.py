"""Weights against the gap between the policy that sampled and the one that is trained.

A rollout log-prob that is missing is NaN, an explicit state: 0 would mean
probability 1. Its token gets weight 0 and is counted.
"""

import jax
import jax.numpy as jnp

from trace_jax.rl.losses import log_ratio, masked_mean

KINDS = ("none", "tis", "icepop", "sequence_mask")


def recorded(logp_rollout, mask):
    """bool[N, T]: masked-in tokens that have a rollout log-prob."""
    return (mask != 0) & jnp.isfinite(logp_rollout)


def _weights(log_ratios, counted, kind, cap, low, high, sequence_cap):
    """(weights f32[N, T], altered bool[N, T]); the caller leaves out what is not counted."""
    ratio = jnp.exp(log_ratios)
    ones = jnp.ones_like(ratio)
    if kind == "tis":
        return jnp.minimum(ratio, cap), ratio > cap
    if kind == "icepop":
        outside = (ratio < low) | (ratio > high)
        return jnp.where(outside, 0.0, ratio), outside
    length = jnp.maximum(jnp.sum(counted, axis=1, keepdims=True), 1)
    mean = jnp.sum(log_ratios, axis=1, keepdims=True) / length
    outside = jnp.broadcast_to(jnp.abs(mean) > jnp.log(sequence_cap), ratio.shape)
    return jnp.where(outside, 0.0, ones), outside


def correction_weights(
    logp_trainer,
    logp_rollout,
    mask,
    *,
    kind: str,
    cap: float = 5.0,
    low: float = 0.5,
    high: float = 5.0,
    sequence_cap: float = 2.0,
):
    """Importance weights and rejection for the train/rollout gap; no gradient.

    Args:
      logp_trainer: f32[N, T], the trainer's log-probs at the weights that sampled.
      logp_rollout: f32[N, T], the sampler's; NaN where not recorded.
      mask: bool or f32 of 0 and 1, [N, T].
      kind: "none", weight 1; "tis", min(p_trainer / p_rollout, cap) (truncated
        importance sampling, "Your efficient RL framework secretly brings you
        off-policy RL training", Yao et al. 2025); "icepop", the ratio inside
        [low, high] and 0 outside (Ring-1T, arXiv 2510.18855); "sequence_mask",
        weight 1, but 0 for a whole row whose geometric-mean ratio is outside
        [1 / sequence_cap, sequence_cap].
      sequence_cap: above 1. The default is wide, for FP4; bands published for BF16
        and FP8 rollouts are far narrower, near 1.001.

    Returns:
      (weights f32[N, T], metrics). Weights are 0 off the mask and, unless kind is
      "none", at tokens without a rollout log-prob. Rejected tokens stay in the
      denominator of aggregation_weights(mask); to take them out, build those from
      `weights > 0`. Metrics, f32: altered_share (clipped by tis, zeroed by icepop
      or sequence_mask) and weight_mean over recorded tokens, dropped_sequences
      (rows with tokens and no weight left), missing (tokens without a log-prob).

    Raises:
      ValueError: unknown kind, a bound out of range, shapes that differ.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown correction {kind!r}; choose one of {', '.join(KINDS)}")
    if not (cap > 0 and 0 <= low <= 1 <= high and sequence_cap > 1):
        raise ValueError(
            f"cap {cap}, low {low}, high {high}, sequence_cap {sequence_cap}: "
            "need cap > 0, 0 <= low <= 1 <= high, sequence_cap > 1"
        )
    counted = recorded(logp_rollout, mask)
    log_ratios = log_ratio(logp_trainer, logp_rollout, counted)
    if kind == "none":
        weights, altered = (mask != 0).astype(jnp.float32), jnp.zeros(mask.shape, bool)
    else:
        weights, altered = _weights(log_ratios, counted, kind, cap, low, high, sequence_cap)
        weights = jnp.where(counted, weights, 0.0)
    has_tokens = jnp.any(mask != 0, axis=1)
    metrics = {
        "altered_share": masked_mean(altered, counted),
        "weight_mean": masked_mean(weights, counted),
        "dropped_sequences": jnp.sum(has_tokens & ~jnp.any(weights != 0, axis=1)),
        "missing": jnp.sum((mask != 0) & ~counted),
    }
    metrics = {name: value.astype(jnp.float32) for name, value in metrics.items()}
    return jax.lax.stop_gradient((weights, metrics))
