"""Which tensor of which layer has which format: explicit, checked, flippable."""

import dataclasses
import fnmatch
from typing import Any

from trace_jax.fp4.formats import FORMATS, Format, format_named
from trace_jax.fp4.fp8 import FP8, E4M3Rows
from trace_jax.fp4.guidance import SITES, select_layers

TENSORS = ("expert_weight", *SITES)


@dataclasses.dataclass(frozen=True)
class LayerPrecision:
    """Formats of one layer; None is BF16.

    Attributes:
      kv_window: the most recent tokens, the query's own included, whose K and V a query reads
        as BF16; older ones as quantized. 0: all as quantized.
      rotate_v: V is quantized after a Hadamard rotation over the head, which the attention's
        output undoes.
    """

    expert_weight: Format | None = None
    expert_in: Format | None = None
    expert_mid: Format | None = None
    k: Format | E4M3Rows | None = None
    v: Format | E4M3Rows | None = None
    kv_window: int = 0
    rotate_v: bool = False


BF16_LAYER = LayerPrecision()


@dataclasses.dataclass(frozen=True)
class Rule:
    """`format` ("nvfp4", "mxfp4", "nvfp4_4over6", "bf16"; for k and v also "fp8") for the
    tensors that match the glob `tensor`, in `layers` (see `select_layers`)."""

    tensor: str
    format: str
    layers: Any = "all"


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
    """Rules in order; a later one overrides an earlier one. No rules: BF16.

    Activations and KV take the power-of-two outer scale of their format (one a
    row), weights the FP32 one. `kv_window` and `rotate_v` (see LayerPrecision) hold in
    the layers whose K or V, and whose V, are quantized.
    """

    rules: tuple[Rule, ...] = ()
    kv_window: int = 0
    rotate_v: bool = False

    def resolve(self, num_layers: int) -> tuple[LayerPrecision, ...]:
        """One LayerPrecision a layer.

        Raises:
          ValueError: a rule matches no tensor or no layer, or names no format of its tensors;
            a negative window.
        """
        if self.kv_window < 0:
            raise ValueError(f"kv_window is {self.kv_window}; write 0 or more tokens")
        layers = [dict.fromkeys(TENSORS) for _ in range(num_layers)]
        for rule in self.rules:
            tensors = fnmatch.filter(TENSORS, rule.tensor)
            chosen = select_layers(rule.layers, num_layers)
            if not tensors or not chosen:
                what = f"tensor among {', '.join(TENSORS)}" if not tensors else "layer"
                raise ValueError(f"precision rule {rule}: matches no {what}")
            for i in chosen:
                layers[i].update({t: _format_for(t, rule.format) for t in tensors})
        return tuple(self._protected(LayerPrecision(**layer)) for layer in layers)

    def _protected(self, layer: LayerPrecision) -> LayerPrecision:
        window = self.kv_window if (layer.k, layer.v) != (None, None) else 0
        rotate = self.rotate_v and layer.v is not None
        return dataclasses.replace(layer, kv_window=window, rotate_v=rotate)


def _format_for(tensor: str, name: str) -> Format | E4M3Rows | None:
    if name == "bf16":
        return None
    if name == FP8.name:
        if tensor not in ("k", "v"):
            raise ValueError(
                f"format 'fp8' for {tensor}: only k and v have FP8 rows; write one of "
                f"{', '.join(FORMATS)}"
            )
        return FP8
    fmt = format_named(name)
    if tensor == "expert_weight" or fmt.scale_type == "e8m0":
        return fmt
    return fmt.replace(outer="pow2")


BF16_POLICY = PrecisionPolicy()
