"""Which tensor of which layer has which format: explicit, checked, flippable."""

import dataclasses
import fnmatch
from typing import Any

from trace_jax.fp4.formats import Format, format_named
from trace_jax.fp4.guidance import SITES, select_layers

TENSORS = ("expert_weight", *SITES)


@dataclasses.dataclass(frozen=True)
class LayerPrecision:
    """Formats of one layer; None is BF16."""

    expert_weight: Format | None = None
    expert_in: Format | None = None
    expert_mid: Format | None = None
    k: Format | None = None
    v: Format | None = None


BF16_LAYER = LayerPrecision()


@dataclasses.dataclass(frozen=True)
class Rule:
    """`format` ("nvfp4", "mxfp4", "nvfp4_4over6", "bf16") for the tensors that match
    the glob `tensor`, in `layers` (see `select_layers`)."""

    tensor: str
    format: str
    layers: Any = "all"


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
    """Rules in order; a later one overrides an earlier one. No rules: BF16.

    Activations and KV take the power-of-two outer scale of their format (one a
    row), weights the FP32 one.
    """

    rules: tuple[Rule, ...] = ()

    def resolve(self, num_layers: int) -> tuple[LayerPrecision, ...]:
        """One LayerPrecision a layer.

        Raises:
          ValueError: a rule matches no tensor or no layer, or names no format.
        """
        layers = [dict.fromkeys(TENSORS) for _ in range(num_layers)]
        for rule in self.rules:
            tensors = fnmatch.filter(TENSORS, rule.tensor)
            chosen = select_layers(rule.layers, num_layers)
            if not tensors or not chosen:
                what = f"tensor among {', '.join(TENSORS)}" if not tensors else "layer"
                raise ValueError(f"precision rule {rule}: matches no {what}")
            for i in chosen:
                layers[i].update({t: _format_for(t, rule.format) for t in tensors})
        return tuple(LayerPrecision(**layer) for layer in layers)


def _format_for(tensor: str, name: str) -> Format | None:
    if name == "bf16":
        return None
    fmt = format_named(name)
    if tensor == "expert_weight" or fmt.scale_type == "e8m0":
        return fmt
    return fmt.replace(outer="pow2")


BF16_POLICY = PrecisionPolicy()
