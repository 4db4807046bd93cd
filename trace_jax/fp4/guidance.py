"""Guidance: what crosses from rollout to trainer, and what it costs.

The rollout keeps, at each planned site of each planned layer, the block scales
of the values it quantized and 0, 1 or 4 bits a value. The trainer quantizes its
own values on the rollout's scales and lets the bits choose the side (TRACE,
section 2).

The outer scale of activations is a power of two and is not sent: the block
scales of a row name it, since (own row maximum / 6) / (largest block scale
received) lies within a few percent of exactly one power of two. Sending it would
cost 4 bytes a row, and taking the trainer's own would be off by a factor of two
whenever a row maximum crosses a binade between the two sides.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from trace_jax.fp4 import formats, syndrome
from trace_jax.fp4.formats import NVFP4, Format
from trace_jax.fp4.rounding import NEAREST, Rounding, fp4_round, midpoints, straight_through

SITES = ("expert_in", "expert_mid", "k", "v")
SOLVED = "solved_bits"  # name of what rematerialization keeps


class SiteShape(NamedTuple):
    """Where a site occurs: its layers, and rows x width values a token and layer."""

    layers: tuple[int, ...]
    rows: int
    width: int


def select_layers(spec: Any, num_layers: int) -> tuple[int, ...]:
    """Layer indices named by `spec`, ascending.

    "all", "none", "first:N", "last:N" (N a count, or a fraction such as 0.5,
    rounded to the nearest layer), indices as text ("0,3,5"), or a sequence of indices.

    Raises:
      ValueError: anything else, or more layers than there are.
    """
    if spec == "all":
        return tuple(range(num_layers))
    if spec == "none":
        return ()
    if isinstance(spec, str) and spec.replace(",", "").isdigit():
        spec = [int(i) for i in spec.split(",") if i]
    if isinstance(spec, str):
        end, _, amount = spec.partition(":")
        try:
            count = int(amount) if amount.isdigit() else round(float(amount) * num_layers)
        except (ValueError, OverflowError):
            count = -1
        if end not in ("first", "last") or not 0 <= count <= num_layers:
            raise ValueError(_layers_help(spec, num_layers))
        first = 0 if end == "first" else num_layers - count
        return tuple(range(first, first + count))
    try:
        layers = tuple(sorted({operator.index(i) for i in spec}))
    except TypeError:
        raise ValueError(_layers_help(spec, num_layers)) from None
    if layers and not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ValueError(f"layers {layers}: the model has layers 0 to {num_layers - 1}")
    return layers


def _layers_help(spec, num_layers) -> str:
    return (
        f"layers {spec!r}: write all, none, first:N, last:N with N a count up to "
        f"{num_layers} or a fraction from 0.0 to 1.0, or indices such as 0,3,5"
    )


@dataclasses.dataclass(frozen=True)
class GuidancePlan:
    """Which rollout outcomes are kept, and how the trainer obeys them.

    Attributes:
      layers: see `select_layers`. The paper's choice is the last half.
      sites: some of "expert_in" (routed-expert input, once a token),
        "expert_mid" (after the gated activation; needs routing replay to line
        up), "k", "v" (as written to the cache).
      bits: 1, the mantissa bit (the paper's); 4, whole codes; 0, scales alone.
      rounding: "nearest", the paper's rule: of the two codewords around the
        trainer's own value, the one nearest to the rollout's; "replay", the
        rollout's codeword itself (needs 4 bits).
      scale_bits: 8, or 2 or 1 (low bits of the scale byte; the trainer's own block
        maximum settles the rest).
      checks: 0, or the share of a row's values that may be near a midpoint on the
        trainer's side: parity checks for so many are sent in place of the bits, see
        `trace_jax.fp4.syndrome`. Rows too short to gain by it send the bits. A row whose
        checks do not hold is rounded to nearest, on the rollout's scales.
      guard: None, or obey a bit only within this many steps (0..0.5) of the
        rounding midpoint.
      on_stale: guidance of an older policy version is obeyed ("obey"), obeyed
        in a guard that shrinks by `fade` a version ("fade"), or not used ("drop").
      fade: factor a version for "fade".
    """

    layers: Any = "last:0.5"
    sites: tuple[str, ...] = ("expert_in", "k", "v")
    bits: Literal[0, 1, 4] = 1
    rounding: Literal["nearest", "replay"] = "nearest"
    scale_bits: Literal[8, 2, 1] = 8
    checks: float = 0.0
    guard: float | None = None
    on_stale: Literal["obey", "fade", "drop"] = "obey"
    fade: float = 0.5

    def __post_init__(self):
        object.__setattr__(self, "sites", tuple(self.sites))
        if isinstance(self.layers, Iterable) and not isinstance(self.layers, str):
            object.__setattr__(self, "layers", tuple(self.layers))
        unknown = [s for s in self.sites if s not in SITES]
        checks = (
            (
                isinstance(self.layers, str | tuple),
                f"layers is {self.layers!r}; write last:0.5, all, none, or indices such as 0,3,5",
            ),
            (not unknown, f"sites {unknown} are unknown; write some of {', '.join(SITES)}"),
            (self.bits in (0, 1, 4), f"bits is {self.bits}; write 0, 1 or 4"),
            (self.scale_bits in (1, 2, 8), f"scale_bits is {self.scale_bits}; write 8, 2 or 1"),
            (
                0 <= self.checks < 1,
                f"checks is {self.checks}; write the share of values in doubt, such as 0.05, or 0",
            ),
            (
                not self.checks or self.bits == 1,
                f"checks stand for one bit a value; write bits=1, not {self.bits}",
            ),
            (
                self.rounding in ("nearest", "replay"),
                f"rounding is {self.rounding!r}; write nearest or replay",
            ),
            (
                self.rounding != "replay" or self.bits == 4,
                f"rounding 'replay' needs the rollout's whole codes; write bits=4, not {self.bits}",
            ),
            (
                self.on_stale in ("obey", "fade", "drop"),
                f"on_stale is {self.on_stale!r}; write obey, fade or drop",
            ),
            (
                self.guard is None or 0 < self.guard <= 0.5,
                f"guard is {self.guard}; write None or a width above 0, up to 0.5 (steps)",
            ),
            (0 < self.fade < 1, f"fade is {self.fade}; write a factor between 0 and 1"),
        )
        for ok, message in checks:
            if not ok:
                raise ValueError(f"guidance plan: {message}")

    @property
    def mode(self) -> str:
        """Rounding mode of the trainer at a guided site."""
        if self.rounding == "replay":
            return "replay"
        return {0: "nearest", 1: "one_bit", 4: "four_bit"}[self.bits]

    def site_layers(self, shapes: Mapping[str, SiteShape], num_layers: int):
        """{site: planned layers that have it}; sites without any are left out."""
        chosen = set(select_layers(self.layers, num_layers))
        planned = {
            site: tuple(i for i in shapes[site].layers if i in chosen)
            for site in self.sites
            if site in shapes
        }
        return {site: layers for site, layers in planned.items() if layers}


NO_GUIDANCE = GuidancePlan(layers="none")


def guidance_bytes_per_token(
    model_config: Any, plan: GuidancePlan, format: Format = NVFP4
) -> float:
    """Bytes of guidance a token (method.md section 3), whole ones a row of a site, as stored.

    Args:
      model_config: anything with `num_layers` and `site_shapes()`, such as
        `trace_jax.model.ModelConfig`.
      plan: what is recorded.
      format: gives the block length and so the number of scales.
    """
    shapes = model_config.site_shapes()
    total = 0.0
    for site, layers in plan.site_layers(shapes, model_config.num_layers).items():
        _, rows, width = shapes[site]
        bits = row_checks(plan, width) or width * plan.bits
        scales = formats.num_blocks(width, format) * plan.scale_bits
        total += len(layers) * rows * (_whole_bytes(bits) + _whole_bytes(scales)) / 8
    return total


def row_checks(plan: GuidancePlan, width: int) -> int:
    """Parity checks that stand for the bits of a row; 0 where the bits are sent."""
    return syndrome.checks_of(_whole_bytes(width), plan.checks) if plan.checks else 0


def _whole_bytes(bits: int) -> int:
    return bits + -bits % 8


# --- the stored record ---------------------------------------------------------


@struct.dataclass
class SiteGuidance:
    """Guidance of one site; leading axes as the caller has them.

    Attributes:
      bits: uint8 [..., ceil(width / 8)] (one bit), [..., checks / 8] (parity checks of
        them), [..., ceil(width / 2)] (codes), or None (scales alone); low bits first.
      scales: uint8 [..., blocks] or, with N-bit scales, [..., ceil(blocks N / 8)].
    """

    bits: jax.Array | None
    scales: jax.Array


def compact(codes: jax.Array, scale_bytes: jax.Array, plan: GuidancePlan) -> SiteGuidance:
    """Packs codes [..., width] and scale bytes [..., blocks] as `plan` says."""
    if plan.bits == 1:
        bits = jnp.packbits(formats.mantissa_bits(codes), axis=-1, bitorder="little")
    elif plan.bits == 4:
        bits = formats.pack(_pad_to(codes, 2))
    else:
        bits = None
    return as_planned(SiteGuidance(bits, scale_bytes), plan)


def as_planned(stored: SiteGuidance, plan: GuidancePlan) -> SiteGuidance:
    """`stored`, which has a row's own bits and whole scale bytes, as `plan` sends it."""
    bits, scales = stored.bits, stored.scales
    if plan.checks and (checks := row_checks(plan, 8 * bits.shape[-1])):
        bits = syndrome.syndrome(formats.unpack(bits, 1), checks)
    if plan.scale_bits < 8:
        each = 8 // plan.scale_bits
        low = _pad_to(scales & jnp.uint8((1 << plan.scale_bits) - 1), each)
        low = low.reshape(*low.shape[:-1], -1, each)
        scales = functools.reduce(
            jnp.bitwise_or, (low[..., i] << i * plan.scale_bits for i in range(each))
        )
    return SiteGuidance(bits, scales)


def hints(stored: SiteGuidance, plan: GuidancePlan, width: int) -> jax.Array | None:
    """uint8 [..., width]: mantissa bits or codes, unpacked; None with 0 bits."""
    if plan.bits == 0:
        return None
    return formats.unpack(stored.bits, plan.bits)[..., :width]


def _pad_to(x, multiple, value=0):
    pad = -x.shape[-1] % multiple
    short = [(0, 0)] * (x.ndim - 1) + [(0, pad)]
    return jnp.pad(x, short, constant_values=value) if pad else x


# --- both sides' quantization of a site ------------------------------------------


class Quantized(NamedTuple):
    """A site's outcome: BF16 values, codes [..., width], scale bytes, outer [..., 1].

    holds: uint8 [..., 1], 0 where a row was sent parity checks that do not hold.
    """

    value: jax.Array
    codes: jax.Array
    scale_bytes: jax.Array
    outer: jax.Array
    holds: jax.Array


class Guide(NamedTuple):
    """Guidance as one site of one layer consumes it.

    `obey`: booleans [...] (one a row of the site): False where nothing was
    recorded or it is not to be used; that is a state of its own, never a zero bit.
    `guard`: None or FP32 [...], the width in steps inside which a bit is obeyed.
    """

    stored: SiteGuidance
    plan: GuidancePlan
    obey: jax.Array
    guard: jax.Array | None = None


def quantize_site(x: jax.Array, fmt: Format, guide: Guide | None = None) -> Quantized:
    """Quantizes activations or K/V x [..., width], one outer scale a row.

    x is rounded to BF16 first: both sides of a rollout quantize the same source.
    Without a guide: nearest, own scales. With one: the rollout's scales and bits
    where `guide.obey`. The value is straight-through differentiable.
    """
    source, width = x.astype(jnp.bfloat16), x.shape[-1]
    x = jax.lax.stop_gradient(formats.fp32_source(x, jnp.bfloat16))
    own = formats.scaled(x, fmt)
    u, scale_bytes, outer = own.u, own.scale_bytes, own.outer
    spec, hint, guard, obey, holds = NEAREST, None, None, None, jnp.ones_like(outer, jnp.uint8)
    if guide is not None:
        obey = guide.obey[..., None]
        received, received_outer = _received(guide, own, fmt)
        scale_bytes = jnp.where(obey, received, scale_bytes)
        outer = jnp.where(obey, received_outer, outer)
        u = formats.divide(own.x, outer[..., None])
    scale = formats.scale_of_values(scale_bytes, fmt)
    if guide is not None:
        spec = Rounding(guide.plan.mode)
        hint, obeyed = _told(guide, u, scale, fmt, width)
        holds, obey = (obeyed == obey).astype(jnp.uint8), obeyed[..., None]
        guard = None if guide.guard is None else guide.guard[..., None, None]
    value, codes = fp4_round(spec, u, scale, hint, guard, obey)
    value = (formats.from_blocks(value, width) * outer).astype(jnp.bfloat16)
    if fmt.residual:
        value = _with_residual(x, value, fmt)
    codes = formats.from_blocks(codes, width)
    return Quantized(straight_through(source, value), codes, scale_bytes, outer, holds)


def _with_residual(x: jax.Array, value: jax.Array, fmt: Format) -> jax.Array:
    """BF16 `value` [..., width] of x plus the FP4 values of its largest errors.

    Which values those are is chosen a row, so that a token does not depend on its batch.
    Hardware would add two products; their operands' sum is rounded to BF16 here.
    """
    error = x - value.astype(jnp.float32)
    count = round(fmt.residual * x.shape[-1])
    least = jax.lax.top_k(jnp.abs(error), count)[0][..., -1:]
    # Equal errors at the edge all get their pass: which of them would be arbitrary.
    error = jnp.where(jnp.abs(error) >= least, error, 0.0)
    second = quantize_site(error, fmt.replace(residual=0.0)).value
    return (value.astype(jnp.float32) + second.astype(jnp.float32)).astype(jnp.bfloat16)


def _told(guide: Guide, u: jax.Array, scale: jax.Array, fmt: Format, width: int):
    """(uint8 of u's shape or None, bool [..., 1]): what rounding consumes, and in which rows.

    u: FP32 [..., blocks, block], the trainer's values, beside the rollout's scales.
    """
    obey = guide.obey[..., None]
    if not row_checks(guide.plan, width):
        hint = hints(guide.stored, guide.plan, width)
        return None if hint is None else formats.to_blocks(hint, fmt), obey
    own = formats.mantissa_bits(formats.encode_e2m1(u, scale))
    magnitude, middle, _ = midpoints(u, scale)
    doubt = jnp.abs(magnitude - middle) / middle  # noise of a product's inputs is relative
    own, doubt = (formats.from_blocks(a, width) for a in (own, doubt))
    bits, holds = syndrome.recover(guide.stored.bits, _pad_to(own, 8), _pad_to(doubt, 8, jnp.inf))
    # Solved once: a backward pass that makes the layer again takes these.
    bits = checkpoint_name(jnp.packbits(bits, axis=-1, bitorder="little"), SOLVED)
    holds = checkpoint_name(holds, SOLVED)
    return formats.to_blocks(formats.unpack(bits, 1)[..., :width], fmt), obey & holds[..., None]


def _received(guide: Guide, own: formats.Scaled, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """The rollout's scale bytes and outer scale, as far as what was sent tells them."""
    pow2, outer, bits = fmt.outer == "pow2", own.outer, guide.plan.scale_bits
    if bits == 8:
        received = guide.stored.scales
        return received, _received_outer(received, own.amax, fmt) if pow2 else outer
    if fmt.scale_rule == "four_over_six":
        raise ValueError(
            f"guidance plan: {bits} bits cannot tell the two scales of 4-over-6 apart; "
            "write scale_bits=8"
        )
    low = formats.unpack(guide.stored.scales, bits)[..., : own.scale_bytes.shape[-1]]
    mine, turn = own.scale_bytes.astype(jnp.int32), 1 << bits
    up = (low.astype(jnp.int32) - mine) % turn
    # Half the way up is half the way down; the side on which the own byte was rounded decides.
    above = own.top > formats.E2M1_MAX * formats.decode_scale(own.scale_bytes, fmt)
    nearest = mine + jnp.where((2 * up > turn) | ((2 * up == turn) & ~above), up - turn, up)
    if pow2:
        # Beyond the last byte the rollout was on the next outer scale, which is 8 bytes.
        over = jnp.any(nearest > 126, axis=-1, keepdims=True)
        nearest, outer = jnp.where(over, nearest - 8, nearest), jnp.where(over, 2 * outer, outer)
    last = 126 if fmt.scale_type == "e4m3" else 254
    return jnp.clip(nearest, 1, last).astype(jnp.uint8), outer


def _received_outer(received: jax.Array, amax: jax.Array, fmt: Format) -> jax.Array:
    """The rollout's power-of-two outer scale, from its block scales and the own maximum."""
    top = jnp.max(formats.decode_scale(received, fmt), axis=-1, keepdims=True)
    exponent = jnp.log2(amax / formats.E2M1_MAX / top)
    # 4-over-6 may have scaled the largest block by 1.5, which is 0.58 of a binade.
    slack = 0.2 if fmt.scale_rule == "four_over_six" else 0.5
    power = jnp.maximum(jnp.ceil(exponent - slack), -117).astype(jnp.int32)
    outer = jax.lax.bitcast_convert_type((power + 127) << 23, jnp.float32)
    return jnp.where(jnp.isfinite(amax), outer, jnp.nan)
