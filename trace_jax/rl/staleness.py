"""What the trainer does with guidance of an older policy version."""

import jax
import jax.numpy as jnp

from trace_jax.fp4 import GuidancePlan
from trace_jax.model import Guidance


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
