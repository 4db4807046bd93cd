"""Group-relative advantages: GRPO (arXiv 2402.03300) and Dr. GRPO (arXiv 2503.20783).

A group is the samples of one prompt instance, one row of [P, G] arrays. A sample
that was not scored (sandbox down, prompt dropped) is invalid: it has no reward,
which is not the same as reward 0.
"""

import jax
import jax.numpy as jnp

SCALES = ("std", "none")
STD_EPSILON = 1e-6


def informative_groups(rewards, valid):
    """Groups that carry a gradient: two valid rewards that differ.

    These are the groups that the dynamic sampling of DAPO keeps (arXiv 2503.14476,
    section 3.2).

    Args:
      rewards: f32[P, G].
      valid: bool[P, G].

    Returns:
      bool[P].
    """
    lowest = jnp.min(jnp.where(valid, rewards, jnp.inf), axis=1)
    highest = jnp.max(jnp.where(valid, rewards, -jnp.inf), axis=1)
    # Not `highest > lowest`: a NaN reward must reach the non-finite guard.
    return jnp.any(valid, axis=1) & (highest != lowest)


def group_advantages(rewards, valid, *, scale: str):
    """Reward minus the group's mean, over the group's standard deviation if asked.

    Args:
      rewards: f32[P, G]; anything, NaN included, where `valid` is False.
      valid: bool[P, G].
      scale: "std" divides by the deviation (ddof 0) plus 1e-6 (GRPO); "none" does
        not (Dr. GRPO).

    Returns:
      f32[P, G]. Exactly 0 for invalid samples, for a group whose valid rewards are
      all equal and for a group with one valid sample. A NaN reward that is marked
      valid makes its own group NaN.

    Raises:
      ValueError: unknown scale, or shapes that differ.
    """
    if scale not in SCALES:
        raise ValueError(f"unknown advantage scale {scale!r}; choose one of {', '.join(SCALES)}")
    if rewards.ndim != 2 or rewards.shape != valid.shape:
        raise ValueError(f"rewards {rewards.shape} and valid {valid.shape} must be one [P, G]")
    rewards = rewards.astype(jnp.float32)
    count = jnp.maximum(jnp.sum(valid, axis=1, keepdims=True), 1)
    mean = jnp.sum(jnp.where(valid, rewards, 0.0), axis=1, keepdims=True) / count
    centred = jnp.where(valid, rewards - mean, 0.0)
    if scale == "std":
        variance = jnp.sum(jnp.square(centred), axis=1, keepdims=True) / count
        centred = centred / (jnp.sqrt(variance) + STD_EPSILON)
    # The mean of three 0.1 is not 0.1 in FP32, so equal rewards are asked for directly.
    advantages = jnp.where(informative_groups(rewards, valid)[:, None], centred, 0.0)
    return jax.lax.stop_gradient(advantages)


def group_stats(rewards, valid):
    """What the groups of a batch looked like.

    Args:
      rewards: f32[P, G].
      valid: bool[P, G].

    Returns:
      dict of f32 scalars. `reward_mean` over valid samples; `zero_variance_share`
      of the groups with at least two valid samples; `singletons`, groups with
      exactly one valid sample; `empty_groups`; `dropped`, invalid samples.
    """
    count = jnp.sum(valid, axis=1)
    comparable = count >= 2
    flat = comparable & ~informative_groups(rewards, valid)
    total = jnp.sum(jnp.where(valid, rewards, 0.0).astype(jnp.float32))
    stats = {
        "reward_mean": total / jnp.maximum(jnp.sum(count), 1),
        "zero_variance_share": jnp.sum(flat) / jnp.maximum(jnp.sum(comparable), 1),
        "singletons": jnp.sum(count == 1),
        "empty_groups": jnp.sum(count == 0),
        "dropped": jnp.sum(~valid),
    }
    return {name: value.astype(jnp.float32) for name, value in stats.items()}
