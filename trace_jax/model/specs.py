"""What a forward is told of its numerics, what it leaves, and how layers fall into runs.

Consecutive layers of one kind and equal numerics form a segment, which is one scan.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
from flax import struct

from trace_jax import fp4
from trace_jax.fp4 import GuidancePlan, LayerPrecision, SiteGuidance
from trace_jax.model.config import ModelConfig
from trace_jax.model.layout import Layout
from trace_jax.model.sites import Codes, LayerSpec

T = TypeVar("T")


@struct.dataclass
class Guidance:
    """Rollout outcomes as the trainer consumes them.

    Attributes:
      sites: {site: SiteGuidance} with leading axes [planned layers, B, S, rows].
      recorded: bool [B, S]; False where the rollout left nothing for a token.
      version: int32 [B], the policy version that left it.
    """

    sites: dict[str, SiteGuidance]
    recorded: jax.Array
    version: jax.Array


@struct.dataclass
class Record:
    """What a forward leaves.

    Attributes:
      sites: {site: SiteGuidance} with leading axes [planned layers, B, S, rows].
      audit: {site: Codes} with leading axes [layers that quantize it, audit rows, S, rows];
        sites that are BF16 in every layer are absent.
      routes: int32 [layers, B, S, slots]; NOT_RECORDED in dense layers beside experts.
    """

    sites: dict[str, SiteGuidance]
    audit: dict[str, Codes]
    routes: jax.Array


class Numerics(NamedTuple):
    """Static numerics of a forward: one LayerSpec a layer, and the plan of its guidance.

    `layout`: how tokens lie over devices, or None on one; the numbers are the same.
    """

    layers: tuple[LayerSpec, ...]
    plan: GuidancePlan = fp4.NO_GUIDANCE
    layout: Layout | None = None


def numerics(
    config: ModelConfig,
    precision: tuple[LayerPrecision, ...],
    *,
    plan: GuidancePlan = fp4.NO_GUIDANCE,
    guide: bool = False,
    record: bool = False,
    audit_rows: int = 0,
    layout: Layout | None = None,
) -> Numerics:
    """Numerics of a forward that guides by, or records for, `plan`.

    A planned site that is BF16 or FP8 in its layer is skipped: there is nothing to guide.
    """
    planned = planned_layers(config, precision, plan)
    layers = []
    for i, (formats_, kind) in enumerate(zip(precision, config.layer_kinds, strict=True)):
        here = tuple(site for site, chosen in planned.items() if i in chosen)
        guided, recorded = here if guide else (), here if record else ()
        layers.append(LayerSpec(formats_, guided, recorded, audit_rows, kind))
    return Numerics(tuple(layers), plan, layout)


def planned_layers(config, precision, plan) -> dict[str, tuple[int, ...]]:
    """{site: layers} where `plan` asks for guidance and `precision` is FP4; FP8 has none."""
    chosen = plan.site_layers(config.site_shapes(), config.num_layers)
    kept = {
        site: tuple(i for i in layers if isinstance(getattr(precision[i], site), fp4.Format))
        for site, layers in chosen.items()
    }
    return {site: layers for site, layers in kept.items() if layers}


def segments(layers: Sequence[T]) -> list[tuple[int, int, T]]:
    """Runs of equal layers as (start, stop, layer); a layer is whatever is said of it."""
    runs = []
    for i, layer in enumerate(layers):
        if runs and runs[-1][2] == layer:
            runs[-1] = (runs[-1][0], i + 1, layer)
        else:
            runs.append((i, i + 1, layer))
    return runs


def layer_runs(config: ModelConfig, precision) -> list[tuple[int, int, LayerSpec]]:
    """Runs of layers of one kind and equal precision: one entry each of a cache."""
    pairs = zip(precision, config.layer_kinds, strict=True)
    return segments(tuple(LayerSpec(formats_, kind=kind) for formats_, kind in pairs))


def stacks_of(layers: dict | tuple) -> tuple[dict, ...]:
    """The parameter stacks of a model's layers, in order."""
    return (layers,) if isinstance(layers, dict) else layers


def depth(stack) -> int:
    """Layers in a stack of parameters."""
    return jax.tree.leaves(stack)[0].shape[0]
