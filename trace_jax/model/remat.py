"""Rematerialization: what of a layer is kept for the backward pass, the rest is made again.

The input of every layer is kept always, and so are bits that parity checks were solved for.
`POINTS` are values inside a layer that may be kept beside them: they take memory and save the
backward pass the products behind them.
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from trace_jax.fp4.guidance import SOLVED

POINTS = {
    "attention_out": "values that attention read, before the output projection",
    "router": "FP32 logits of the router",
    "expert_weight": "experts' weights in use: quantizing them is most of what QAT adds",
    "gate_up": "FP32 product of the experts' first weight",
    "expert_mid": "input of the experts' second product",
}


def keepable(x: jax.Array, point: str) -> jax.Array:
    """x, which a policy can keep under the name `point`."""
    return checkpoint_name(x, point)


def points_of(remat: str) -> tuple[str, ...] | None:
    """What "none", "full" or names such as "attention_out,gate_up" keep; None is everything.

    Raises:
      ValueError: a name that is none of POINTS.
    """
    if remat == "none":
        return None
    names = () if remat == "full" else tuple(remat.split(","))
    unknown = [name for name in names if name not in POINTS]
    if unknown:
        raise ValueError(
            f"{', '.join(map(repr, unknown))} is nothing that can be kept; write none, full or "
            f"some of {','.join(POINTS)}"
        )
    return names


def keeping(*names: str) -> Callable:
    """The policy of `jax.checkpoint` that keeps `names`, and bits that were solved for."""
    return jax.checkpoint_policies.save_only_these_names(*names, SOLVED)


def checkpointed(body: Callable, kept: tuple[str, ...] | None) -> Callable:
    """`body` of a scan, of which the backward pass keeps `kept` and what the scan hands on."""
    if kept is None:
        return body
    return jax.checkpoint(body, policy=keeping(*kept), prevent_cse=False)
