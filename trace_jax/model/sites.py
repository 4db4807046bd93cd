"""Quantization sites inside a layer: quantize, guide, record, perturb.

A site is where values meet FP4: the experts' two inputs, K and V. One function
serves rollout and trainer, so what differs between them is in the arguments.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from trace_jax import fp4
from trace_jax.fp4 import (
    Fp8Rows,
    GuidancePlan,
    Guide,
    LayerPrecision,
    Quantized,
    SiteGuidance,
)
from trace_jax.kernels.fake_quantize import fake_quantize_rows
from trace_jax.model.config import LayerKind
from trace_jax.model.layers import rounded
from trace_jax.model.layout import Layout


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Static description of one layer's numerics.

    Attributes:
      precision: formats of the layer.
      guided: sites whose rounding follows the rollout.
      recorded: sites whose outcomes leave the layer, packed as the plan says.
      audit_rows: of the first so many sequences, whole codes and scales of every
        site leave the layer too.
      kind: what the layer is made of.
    """

    precision: LayerPrecision
    guided: tuple[str, ...] = ()
    recorded: tuple[str, ...] = ()
    audit_rows: int = 0
    kind: LayerKind = LayerKind()


class Codes(NamedTuple):
    """Whole outcome of a site: see fp4.Quantized."""

    codes: jax.Array
    scale_bytes: jax.Array
    outer: jax.Array
    holds: jax.Array


class Stored(NamedTuple):
    """Guidance of a site of one layer, [B, S, rows, ...]; `given` bool: whether it has any."""

    guidance: SiteGuidance
    given: jax.Array


@struct.dataclass
class SiteInputs:
    """What the sites of one layer are given.

    Attributes:
      stored: {site: Stored} of the sites that are guided in some layer.
      obey: bool [B, S]; None without guidance.
      guard: FP32 [B, S] in steps, or None.
      noise_key: key of the emulated engine noise, or None.
      noise: its relative size (static).
    """

    stored: dict[str, Stored] = struct.field(default_factory=dict)
    obey: jax.Array | None = None
    guard: jax.Array | None = None
    noise_key: jax.Array | None = None
    noise: float = struct.field(pytree_node=False, default=0.0)


@struct.dataclass
class SiteOutputs:
    """What the sites of one layer leave: {site: SiteGuidance} and {site: Codes}."""

    recorded: dict[str, SiteGuidance] = struct.field(default_factory=dict)
    audit: dict[str, Codes] = struct.field(default_factory=dict)


def perturbed(site: str, x: jax.Array, key: jax.Array | None, noise: float) -> jax.Array:
    """x with relative noise of size `noise`, in x's dtype; x itself without a key or noise."""
    if key is None or not noise:
        return x
    key = jax.random.fold_in(key, fp4.SITES.index(site))
    drawn = noise * jax.random.normal(key, x.shape, jnp.float32)
    return rounded(x.astype(jnp.float32) * (1 + drawn), x.dtype)


class Sites:
    """The sites of one layer during one trace; collects what they leave.

    `decoding`: a rollout's program, which may take ops that do a step's small work in one
    launch and have no gradient. `layout`: how tokens lie over devices, or
    None on one.
    """

    def __init__(
        self,
        spec: LayerSpec,
        plan: GuidancePlan,
        inputs: SiteInputs,
        decoding: bool = False,
        layout: Layout | None = None,
    ):
        self.spec, self.plan, self.inputs, self.decoding = spec, plan, inputs, decoding
        self.layout = layout
        self.outputs = SiteOutputs(recorded={}, audit={})

    def perturb(self, site: str, x: jax.Array) -> jax.Array:
        """x with the relative noise that stands for a foreign engine, in x's dtype."""
        return perturbed(site, x, self.inputs.noise_key, self.inputs.noise)

    def guide(self, site: str, match: jax.Array | None = None) -> Guide | None:
        """Guide of a site with rows [B, S, rows]; `match` [B, S, rows] narrows where to obey."""
        if site not in self.spec.guided:
            return None
        stored, given = self.inputs.stored[site]
        obey = self.inputs.obey & given
        obey = jnp.broadcast_to(obey[..., None], (*obey.shape, stored.scales.shape[2]))
        guard = self.inputs.guard
        if guard is not None:
            guard = jnp.broadcast_to(guard[..., None], obey.shape)
        return Guide(stored, self.plan, obey if match is None else obey & match, guard)

    def quantize(self, site: str, x: jax.Array) -> tuple[jax.Array, Quantized | None]:
        """The values that x [B, S, rows, width] becomes at a site, and how.

        The second is None where the site is BF16.
        """
        return self.encode(site, self.perturb(site, x))

    def encode(self, site: str, x: jax.Array) -> tuple[jax.Array, Quantized | Fp8Rows | None]:
        """`quantize` of an x that is perturbed already. FP8 rows leave no record."""
        fmt = getattr(self.spec.precision, site)
        if fmt is None:
            return x, None
        if fmt == fp4.FP8:
            out = fp4.quantize_fp8(x)
            return out.value, out
        out = fp4.quantize_site(x, fmt, self.guide(site))
        self.leave(site, Codes(*out[1:]))
        return out.value, out

    def quantize_rows(self, site: str, x: jax.Array) -> tuple[jax.Array, SiteGuidance | None]:
        """`quantize` in one launch, for x [..., width]: values, and guidance if it is recorded."""
        fmt = getattr(self.spec.precision, site)
        if fmt is None:
            return x, None
        value, left = fake_quantize_rows(x, fmt, record=self.record_bits(site))
        return value.astype(x.dtype), left

    def keep(self, site: str, guidance: SiteGuidance) -> None:
        """Keeps guidance [B, S, rows, ...] that an op made: bits, and whole scale bytes."""
        self.outputs.recorded[site] = fp4.as_planned(guidance, self.plan)

    def record_bits(self, site: str) -> int | None:
        """Bits a value that are recorded at a site; None where nothing is."""
        return self.plan.bits if site in self.spec.recorded else None

    def leave(self, site: str, out: Codes) -> None:
        """Keeps a site's outcome [B, S, rows, ...] as far as the spec asks for it."""
        if site in self.spec.recorded:
            self.outputs.recorded[site] = fp4.compact(out.codes, out.scale_bytes, self.plan)
        if self.spec.audit_rows:
            self.outputs.audit[site] = Codes(*(a[: self.spec.audit_rows] for a in out))
