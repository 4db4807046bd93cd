"""Aggregation weights and the clipped policy objective.

Everything is FP32. A loss is `sum(weights * per_token_loss)` with weights made
once for the WHOLE batch, so micro-batches and devices just add up.
"""

import math

import jax
import jax.numpy as jnp

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
LEVELS = ("token", "sequence")
# exp(20) = 4.9e8: far outside any trust region, and its square still fits FP32.
LOG_RATIO_LIMIT = 20.0
# Above this the k3 estimator goes on as a straight line of slope exp(10) - 1.
KL_LINEAR_FROM = 10.0

_GRPO = {
    "scale": "std",
    "aggregation": "sequence_mean",
    "level": "token",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "dynamic_sampling": False,
}
ALGORITHMS = {
    "grpo": _GRPO,  # arXiv 2402.03300
    "dr_grpo": {**_GRPO, "scale": "none", "aggregation": "constant"},  # arXiv 2503.20783
    "dapo": {  # arXiv 2503.14476
        **_GRPO,
        "aggregation": "token_mean",
        "clip_high": 0.28,
        "dynamic_sampling": True,
    },
    "gspo": {**_GRPO, "level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},  # 2507.18071
    # TBPO of QaRL (arXiv 2604.07853): sequence ratios above 1 + 4e-4 are cut for positive
    # advantages; for negative ones a band holds them from 1 - 3e-4 to 1 + 7e-4.
    "tbpo": {
        **_GRPO,
        "level": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": 1 + 7e-4,
    },
}


def _choose(name: str, choices, what: str) -> None:
    if name not in choices:
        raise ValueError(f"unknown {what} {name!r}; choose one of {', '.join(choices)}")


def algorithm(name: str) -> dict:
    """A copy of the named entry of ALGORITHMS; ValueError lists the names."""
    _choose(name, ALGORITHMS, "algorithm")
    return dict(ALGORITHMS[name])


def aggregation_weights(mask, mode: str, *, max_length: int):
    """Weights w for which the loss is sum(w * per_token_loss) over the whole batch.

    Args:
      mask: bool or f32 of 0 and 1, [N, T], of the WHOLE batch; split afterwards.
      mode: "token_mean", mask / sum(mask) (DAPO); "sequence_mean", the mean over
        non-empty sequences of their token means (GRPO); "constant", mask /
        (non-empty sequences * max_length) (Dr. GRPO).
      max_length: the response budget; used by "constant" only.

    Returns:
      f32[N, T]; zeros for empty rows and for an empty batch.

    Raises:
      ValueError: unknown mode.
    """
    _choose(mode, AGGREGATIONS, "aggregation")
    mask = (mask != 0).astype(jnp.float32)
    lengths = jnp.sum(mask, axis=1, keepdims=True)
    sequences = jnp.maximum(jnp.sum(lengths > 0), 1).astype(jnp.float32)
    if mode == "token_mean":
        return mask / jnp.maximum(jnp.sum(mask), 1.0)
    if mode == "sequence_mean":
        return mask / (jnp.maximum(lengths, 1.0) * sequences)
    return mask / (sequences * max_length)


def log_difference(new, old, mask):
    """f32[N, T] new - old; exact zeros and no gradient off the mask.

    NaN under the mask stays NaN, for the non-finite guard to see. ValueError if
    the three shapes differ: a short row of log-probs is never filled up.
    """
    if not new.shape == old.shape == mask.shape:
        raise ValueError(f"log-probs {new.shape}, {old.shape} and mask {mask.shape} must be equal")
    return jnp.where(mask != 0, new.astype(jnp.float32) - old.astype(jnp.float32), 0.0)


def log_ratio(new, old, mask):
    """log_difference, clamped so that its exp and the square of that are finite."""
    return jnp.clip(log_difference(new, old, mask), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def masked_mean(values, mask):
    """Mean over a bool mask; 0 when the mask is empty, whatever the values off it."""
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def _sequence_log_ratio(token_log_ratio, mask):
    """The row's mean log-ratio at each token, gradient to that token alone (GSPO, section 4.3)."""
    length = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    mean = jnp.sum(token_log_ratio, axis=1, keepdims=True) / length
    stop = jax.lax.stop_gradient
    return stop(mean) + (token_log_ratio - stop(token_log_ratio))


def policy_loss(
    logp,
    old_logp,
    advantages,
    mask,
    weights,
    *,
    clip_low: float,
    clip_high: float,
    level: str,
    dual_clip: float | None = None,
):
    """PPO-clip (arXiv 1707.06347) on token ratios, or on sequence ratios (GSPO, 2507.18071).

    Args:
      logp, old_logp: f32[N, T]; only `logp` is differentiated.
      advantages: f32[N].
      mask: bool or f32 of 0 and 1, [N, T].
      weights: f32[N, T], aggregation times correction weights; constants.
      clip_low, clip_high: the ratio is held in [1 - clip_low, 1 + clip_high].
      level: "token" or "sequence" (geometric mean over the row's masked-in tokens;
        with "sequence_mean" weights the gradient is that of GSPO).
      dual_clip: for negative advantages the ratio counts at most this, above 1
        (arXiv 1912.09729).

    Returns:
      (loss, metrics). Metrics are means over this call's masked-in tokens:
      clip_fraction and dual_clip_fraction (tokens whose gradient was cut),
      ratio_mean, ratio_max, approx_kl (k3 of the token ratios), and `tokens`, by
      which to weight them when micro-batches are joined.

    Raises:
      ValueError: unknown level, dual_clip not above 1, shapes that differ.
    """
    _choose(level, LEVELS, "ratio level")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip {dual_clip} must be above 1")
    mask = mask != 0
    stop = jax.lax.stop_gradient
    token_log_ratio = log_ratio(logp, stop(old_logp), mask)
    sequence = level == "sequence"
    ratio = jnp.exp(_sequence_log_ratio(token_log_ratio, mask) if sequence else token_log_ratio)

    advantage = stop(advantages)[:, None]
    over = (advantage > 0) & (ratio > 1 + clip_high)
    under = (advantage < 0) & (ratio < 1 - clip_low)
    held = jnp.where(over, 1 + clip_high, jnp.where(under, 1 - clip_low, ratio))
    capped = (advantage < 0) & (ratio > (jnp.inf if dual_clip is None else dual_clip))
    held = held if dual_clip is None else jnp.where(capped, dual_clip, held)
    # Selected on both factors: 0 * NaN off the mask would be NaN.
    token_loss = jnp.where(mask, -held * advantage, 0.0)
    loss = jnp.sum(jnp.where(mask, stop(weights), 0.0) * token_loss)

    metrics = {
        "clip_fraction": masked_mean(over | under, mask),
        "dual_clip_fraction": masked_mean(capped, mask),
        "ratio_mean": masked_mean(ratio, mask),
        "ratio_max": jnp.max(jnp.where(mask, ratio, 0.0)),
        "approx_kl": masked_mean(jnp.expm1(token_log_ratio) - token_log_ratio, mask),
        "tokens": jnp.sum(mask).astype(jnp.float32),
    }
    return loss, jax.tree.map(stop, metrics)


def kl_to_reference(logp, ref_logp, mask, weights):
    """Weighted k3 estimate of KL(policy || reference) on the policy's samples.

    exp(d) - 1 - d with d = ref_logp - logp (Schulman, "Approximating KL
    divergence"; GRPO eq. 4). From d = 10 on it continues along its tangent, so a
    token that the policy has all but forgotten is still pulled back, by a finite
    gradient.

    Args:
      logp, ref_logp: f32[N, T]; only `logp` is differentiated.
      mask: bool or f32 of 0 and 1, [N, T].
      weights: f32[N, T] from aggregation_weights.

    Returns:
      f32 scalar.
    """
    mask = mask != 0
    d = log_difference(jax.lax.stop_gradient(ref_logp), logp, mask)
    near = jnp.minimum(d, KL_LINEAR_FROM)  # exp sees no more than this, in the gradient too
    slope = math.expm1(KL_LINEAR_FROM)
    tangent = slope - KL_LINEAR_FROM + slope * (d - KL_LINEAR_FROM)
    k3 = jnp.where(d > KL_LINEAR_FROM, tangent, jnp.expm1(near) - near)
    return jnp.sum(jnp.where(mask, jax.lax.stop_gradient(weights), 0.0) * k3)
