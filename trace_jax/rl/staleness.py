"""What the trainer does with rollouts and guidance of an older policy version."""

import jax
import jax.numpy as jnp

from trace_jax.fp4 import GuidancePlan
from trace_jax.model import Guidance
from trace_jax.rl.mismatch import logprob_ledger

BY_LAG = ("gap_mean", "gap_p99", "kl_k3", "ess_share", "tokens")  # of the ledger


def apply_staleness(
    guidance: Guidance, plan: GuidancePlan, version: jax.Array
) -> tuple[Guidance, jax.Array | None]:
    """Guidance as a learner at `version` may use it, and its guard FP32 [B, S] or None.

    With lag = version - guidance.version: "obey" ignores the lag; "drop" turns
    `recorded` off where lag > 0; "fade" narrows the guard (0.5, all of the step, if
    the plan has none) by `plan.fade` a version.
    """
    lag = (version - guidance.version)[:, None]
    if plan.on_stale == "drop":
        guidance = guidance.replace(recorded=guidance.recorded & (lag <= 0))
    if plan.guard is None and plan.on_stale != "fade":
        return guidance, None
    width = jnp.float32(0.5 if plan.guard is None else plan.guard)
    if plan.on_stale == "fade":
        width = width * jnp.float32(plan.fade) ** jnp.maximum(lag, 0).astype(jnp.float32)
    return guidance, jnp.broadcast_to(width, guidance.recorded.shape)


def ledger_by_lag(logp_trainer, logp_rollout, mask, advantages, lag, most: int) -> dict:
    """{"lag<k>/<name>": FP32 scalar} of BY_LAG for the rows of each lag from 0 to `most`.

    Args:
      lag: int32 [N], versions between rollout and trainer; the others as `logprob_ledger`.
    """
    split = {}
    for k in range(most + 1):
        rows = mask & (lag == k)[:, None]
        ledger = logprob_ledger(logp_trainer, logp_rollout, rows, advantages)
        split |= {f"lag{k}/{name}": ledger[name] for name in BY_LAG}
    return split
