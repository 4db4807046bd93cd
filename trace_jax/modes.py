"""What each training mode means: formats of the rollout and of the trainer, guidance."""

import dataclasses
from typing import NamedTuple

from trace_jax.config import Config
from trace_jax.fp4 import BF16_POLICY, NO_GUIDANCE, GuidancePlan, LayerPrecision

QUADS_SHARE = 0.5  # of a row's values that get a second pass (arXiv 2607.15810)


class Mode(NamedTuple):
    """Formats a layer of the rollout and of the trainer's forward, and the plan between them."""

    rollout: tuple[LayerPrecision, ...]
    trainer: tuple[LayerPrecision, ...]
    plan: GuidancePlan


def fp4_precision(config: Config) -> tuple[LayerPrecision, ...]:
    """Formats of FP4 inference, the same for every mode: what is deployed."""
    return config.fp4_policy().resolve(config.model.num_layers)


def bf16_precision(config: Config) -> tuple[LayerPrecision, ...]:
    return BF16_POLICY.resolve(config.model.num_layers)


def resolve(config: Config) -> Mode:
    """The formats behind `config.mode`.

    bf16 and post_hoc train alike (BF16 on both sides); post_hoc is judged by the
    final policy quantized to FP4. naive: FP4 rollout, BF16 trainer. qat: both FP4,
    each with its own scales. w4a16: FP4 weights, BF16 activations and the policy's
    KV format, on both sides. quads: the trainer as in w4a16, the rollout FP4 with a
    second pass over the larger half of the activations' errors. trace: both FP4, the
    trainer guided by the plan.
    """
    layers = config.model.num_layers
    bf16, fp4 = bf16_precision(config), fp4_precision(config)
    w4a16 = config.fp4_policy(weights_only=True).resolve(layers)
    return {
        "bf16": Mode(bf16, bf16, NO_GUIDANCE),
        "post_hoc": Mode(bf16, bf16, NO_GUIDANCE),
        "naive": Mode(fp4, bf16, NO_GUIDANCE),
        "qat": Mode(fp4, fp4, NO_GUIDANCE),
        "w4a16": Mode(w4a16, w4a16, NO_GUIDANCE),
        "quads": Mode(tuple(map(_two_passes, fp4)), w4a16, NO_GUIDANCE),
        "trace": Mode(fp4, fp4, config.guidance.plan()),
    }[config.mode]


def _two_passes(layer: LayerPrecision) -> LayerPrecision:
    sites = {name: getattr(layer, name) for name in ("expert_in", "expert_mid")}
    passes = {k: f.replace(residual=QUADS_SHARE) for k, f in sites.items() if f is not None}
    return dataclasses.replace(layer, **passes)
