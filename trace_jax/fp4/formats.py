"""NVFP4 and MXFP4 as data, and the one codec for both.

Every number that becomes FP4 anywhere in this project (rollout, trainer,
weight sync, export) goes through the functions of this file, so that
`fake_quant(x) == dequantize(quantize(x))` bit for bit.

A value is stored as  code (E2M1, 4 bits)  x  block scale (8 bits, one a block)
x  outer scale (one a tensor or a row; NVFP4 only).  E2M1 x E4M3 needs at most
six significant bits, so code x block scale is exact in BF16; the outer scale
multiplies FP32 results.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_SMALLEST = 2.0**-9
# The smallest outer scale: times the smallest block scale it is still a normal
# FP32 number, so nothing downstream is flushed to zero and no reciprocal is Inf.
OUTER_FLOOR = 2.0**-117

ScaleRule = Literal["six", "four_over_six", "floor", "ceil", "round_up"]
OuterRule = Literal["amax", "pow2", "none"]


@dataclasses.dataclass(frozen=True)
class Format:
    """One FP4 format.

    Attributes:
      name: as users write it in configs.
      block: values that share a block scale.
      scale_type: "e4m3" (NVFP4) or "e8m0" (MXFP4).
      scale_rule: how the block scale follows from the block maximum.
        e4m3: "six" maps the maximum to 6; "four_over_six" to 6 or to 4,
        whichever has the smaller squared error (ties: 6).
        e8m0: "floor" is the OCP rule 2**(floor(log2 amax) - 2); "ceil" the
        smallest power of two that clips nothing; "round_up" the OCP rule with
        mantissas from 1.75 on counted as the next power of two.
      outer: rule of the outer scale. "amax": FP32 amax / (6 * 448), the NVFP4
        standard, used for weights. "pow2": the next power of two above it,
        used for activations and the KV-cache: multiplying by it is exact, and
        the trainer recovers the rollout's value from the block scales alone
        (see guidance.py). "none": no outer scale.
      residual: share of a row's values, those with the largest error, whose error is
        quantized in a second pass (QUADS, arXiv 2607.15810); activations only. 0: none.
    """

    name: str
    block: int
    scale_type: Literal["e4m3", "e8m0"]
    scale_rule: ScaleRule
    outer: OuterRule
    residual: float = 0.0

    def __post_init__(self):
        rules = {"e4m3": ("six", "four_over_six"), "e8m0": ("floor", "ceil", "round_up")}
        if self.scale_rule not in rules[self.scale_type]:
            raise ValueError(
                f"format {self.name}: scale rule {self.scale_rule!r} does not go with "
                f"{self.scale_type} scales; write one of {', '.join(rules[self.scale_type])}"
            )
        if self.scale_type == "e8m0" and self.outer != "none":
            raise ValueError(f"format {self.name}: E8M0 scales take no outer scale")

    @property
    def top_scale(self) -> float:
        """The block scale that the largest block of a tensor gets (e4m3)."""
        # 4-over-6 may scale a block by 1.5 more than the plain rule does.
        return 256.0 if self.scale_rule == "four_over_six" else E4M3_MAX

    def replace(self, **changes) -> "Format":
        return dataclasses.replace(self, **changes)


NVFP4 = Format("nvfp4", 16, "e4m3", "six", "amax")
MXFP4 = Format("mxfp4", 32, "e8m0", "floor", "none")
NVFP4_4OVER6 = NVFP4.replace(name="nvfp4_4over6", scale_rule="four_over_six")

FORMATS = {f.name: f for f in (NVFP4, MXFP4, NVFP4_4OVER6)}


def format_named(name: str) -> Format:
    """The format called `name`; ValueError lists the known ones."""
    if name not in FORMATS:
        raise ValueError(f"unknown FP4 format {name!r}; write one of {', '.join(FORMATS)}")
    return FORMATS[name]


def divide(x: jax.Array, y: jax.Array | float) -> jax.Array:
    """x / y, correctly rounded whatever the shapes and the program around it.

    XLA turns division by a broadcast y into multiplication by 1 / y, which is an
    ulp off and moves ties; a divisor that depends on x is left alone.
    """
    return x / jnp.where(x == x, y, x)


def not_again(x: jax.Array) -> jax.Array:
    """x, divided by one: a value that XLA computes once, wherever it is read.

    What is cheap it computes again at every place that reads it (a block's scale at every value,
    a row at every expert it goes to), unless a division ends it.
    """
    return divide(x, 1.0)


def fp32_source(x: jax.Array, dtype=None) -> jax.Array:
    """`x` as FP32, holding exactly the values of `dtype` (default: that of x).

    A cast to BF16 and back is dropped by XLA:GPU where both meet in one program,
    and then the two sides of a rollout quantize different values.
    """
    x32 = x.astype(jnp.float32)
    if jnp.dtype(dtype or x.dtype) == jnp.bfloat16:
        return jax.lax.reduce_precision(x32, exponent_bits=8, mantissa_bits=7)
    return x32


def largest(x: jax.Array, axis=-1, keepdims: bool = False) -> jax.Array:
    """Largest absolute value of FP32 `x` over `axis`; NaN where there is one.

    Compares bits: a compiled floating-point maximum may drop NaN (XLA:CPU does, by
    shape), and the bad value would become a clean code.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    top = jnp.max(bits, axis=axis, keepdims=keepdims)
    return jax.lax.bitcast_convert_type(top, jnp.float32)


# --- E2M1 codes --------------------------------------------------------------

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7
# Where the nearest code moves from i to i + 1; a tie goes to the even one of the two.
MIDPOINTS = tuple((a + b) / 2 for a, b in zip(MAGNITUDES[:-1], MAGNITUDES[1:], strict=True))


def grid_step(magnitude: jax.Array) -> jax.Array:
    """Distance between the E2M1 magnitudes around `magnitude` (0.5, 1 or 2)."""
    return jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0)).astype(jnp.float32)


def _signed(index: jax.Array, x: jax.Array) -> jax.Array:
    return index | (jnp.signbit(x).astype(jnp.uint8) << 3)


def encode_e2m1(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    """Codes (uint8, 0..15) of FP32 `x` / `scale`, nearest, ties to even, clipped at 6.

    Compares |x| with scale x midpoint, which is exact, and divides nothing: XLA:GPU
    divides to within 2 ulp, and the codes at ties would differ from the CPU's.
    NaN has no code; it must be carried by the block scale.
    """
    size = jnp.abs(x)
    index = jnp.zeros(x.shape, jnp.uint8)
    for i, midpoint in enumerate(MIDPOINTS):
        edge = midpoint * scale
        index += (size > edge if i % 2 == 0 else size >= edge).astype(jnp.uint8)
    return _signed(index, x)


def bracket_e2m1(x: jax.Array, scale: jax.Array | float = 1.0) -> tuple[jax.Array, jax.Array]:
    """The two codes around FP32 `x` / `scale`, the smaller magnitude first.

    Equal where x is a codeword or beyond the last one. Exact, as `encode_e2m1` is.
    """
    size = jnp.abs(x)
    low, high = jnp.zeros(x.shape, jnp.uint8), jnp.zeros(x.shape, jnp.uint8)
    for i, magnitude in enumerate(MAGNITUDES[:-1]):
        high += (size > magnitude * scale).astype(jnp.uint8)
        low += (size >= MAGNITUDES[i + 1] * scale).astype(jnp.uint8)
    return _signed(low, x), _signed(high, x)


def decode_e2m1(codes: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Values of uint8 codes.

    No subnormal number occurs on the way: with x the BF16 whose bits are
    ((c & 7) << 6) + 0x3F00, the magnitude is min(x, 2x - 1). The usual
    shift-and-multiply makes 0.5 a subnormal, which XLA:CPU flushes to zero.
    """
    bits = ((codes & 7).astype(jnp.uint32) << 22) + jnp.uint32(0x3F000000)
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    magnitude = jnp.minimum(x, 2 * x - 1)
    return jnp.where(codes & 8, -magnitude, magnitude).astype(dtype)


def mantissa_bits(codes: jax.Array) -> jax.Array:
    """The mantissa bit of each E2M1 code, uint8 0 or 1 (TRACE, section 2).

    It is the parity of the magnitude's index, so the two neighbours of any
    value always differ in it.
    """
    return codes & jnp.uint8(1)


def pack(codes: jax.Array) -> jax.Array:
    """Codes [..., n] (n even) to bytes [..., n / 2]; the first goes to the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"pack: last axis has odd length {codes.shape[-1]}; pad it to an even one")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: jax.Array, bits: int = 4) -> jax.Array:
    """Bytes [..., m] to the values of `bits` bits in them [..., m * 8 / bits], low bits first."""
    if bits == 1:
        return jnp.unpackbits(packed, axis=-1, bitorder="little")
    mask = jnp.uint8((1 << bits) - 1)
    parts = jnp.stack([packed >> shift & mask for shift in range(0, 8, bits)], axis=-1)
    return parts.reshape(*packed.shape[:-1], -1)


# --- block scales ------------------------------------------------------------


def scale_of_values(scale_bytes: jax.Array, fmt: Format) -> jax.Array:
    """FP32 [..., blocks, 1], to stand beside values in blocks."""
    return not_again(decode_scale(scale_bytes, fmt))[..., None]


def decode_scale(scale_bytes: jax.Array, fmt: Format) -> jax.Array:
    """FP32 values of the stored scale bytes (uint8)."""
    if fmt.scale_type == "e4m3":
        return decode_e4m3(scale_bytes)
    exponent = scale_bytes.astype(jnp.uint32) << 23
    exponent = jnp.where(scale_bytes == 0, jnp.uint32(0x00400000), exponent)  # 2**-127
    exponent = jnp.where(scale_bytes == 255, jnp.uint32(0x7FC00000), exponent)
    return jax.lax.bitcast_convert_type(exponent, jnp.float32)


# E4M3 goes by bits and never through the float8 type: where the encoded scale is
# decoded in the same program, XLA:GPU drops the pair of casts and the codes are then
# rounded on a scale that is not the stored one.


def decode_e4m3(byte: jax.Array) -> jax.Array:
    """FP32 values of E4M3 bytes; 0x7F and 0xFF are NaN."""
    low = (byte & 0x7F).astype(jnp.uint32)
    normal = jax.lax.bitcast_convert_type((low << 20) + jnp.uint32(120 << 23), jnp.float32)
    magnitude = jnp.where(low < 8, low.astype(jnp.float32) * E4M3_SMALLEST, normal)
    magnitude = jnp.where(low == 0x7F, jnp.nan, magnitude)
    return jnp.where(byte & 0x80, -magnitude, magnitude)


def _encode_e4m3(raw: jax.Array) -> jax.Array:
    # The floor keeps a small block alive instead of dividing by a zero scale.
    clipped = jnp.clip(raw, E4M3_SMALLEST, E4M3_MAX)
    bits = jax.lax.bitcast_convert_type(clipped, jnp.uint32)
    even = bits + jnp.uint32(0x7FFFF) + ((bits >> 20) & 1)  # ties to even at 3 mantissa bits
    normal = (even >> 20) - jnp.uint32(120 << 3)
    subnormal = jnp.round(clipped / E4M3_SMALLEST).astype(jnp.uint32)
    byte = jnp.where(clipped < 2.0**-6, subnormal, normal)
    return jnp.where(jnp.isnan(raw), 0x7F, byte).astype(jnp.uint8)


def _encode_e4m3_ratio(x: jax.Array, divisor: float) -> jax.Array:
    """E4M3 byte of x / divisor, rounded as the exact quotient is.

    The division may be 2 ulp off (XLA:GPU), so a byte is taken and then compared with
    its neighbours through products, which are exact: a midpoint has 5 bits.
    """
    byte = _encode_e4m3(x / divisor)
    value, above, below = (decode_e4m3(byte + jnp.uint8(d)) for d in (0, 1, 255))
    odd, over, under = byte & 1, divisor * (value + above) / 2, divisor * (value + below) / 2
    up = (x > over) | ((x == over) & (odd == 1))
    down = (x < under) | ((x == under) & (odd == 1))
    moved = byte + (up & (byte < 0x7E)).astype(jnp.uint8) - (down & (byte > 1)).astype(jnp.uint8)
    return jnp.where(byte == 0x7F, byte, moved)


def _encode_e8m0(amax: jax.Array, rule: ScaleRule) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(amax, jnp.uint32)
    if rule == "round_up":
        bits = bits + jnp.uint32(0x00200000)
    exponent = (bits >> 23).astype(jnp.int32) - 127 - 2
    if rule == "ceil":
        exponent = exponent + ((bits & jnp.uint32(0x7FFFFF)) > 0x400000)
    # From -126 on: the scale itself stays a normal FP32 number.
    byte = (jnp.clip(exponent, -126, 127) + 127).astype(jnp.uint8)
    return jnp.where(jnp.isfinite(amax), byte, jnp.uint8(255))


def outer_scale(amax: jax.Array, fmt: Format) -> jax.Array:
    """FP32 outer scale for the largest absolute value(s) `amax`.

    A non-finite `amax` gives NaN, so that bad input stays visible: E2M1 itself
    has no NaN and would turn it into a clean number.
    """
    amax = amax.astype(jnp.float32)
    if fmt.outer == "none":
        return jnp.where(jnp.isfinite(amax), jnp.float32(1.0), jnp.nan)
    outer = jnp.maximum(divide(amax, E2M1_MAX * fmt.top_scale), OUTER_FLOOR)
    if fmt.outer == "pow2":
        bits = jax.lax.bitcast_convert_type(outer, jnp.uint32)
        # The division may be an ulp off: half of the power is checked against amax itself.
        up = jax.lax.bitcast_convert_type(
            (bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0xFF800000), jnp.float32
        )
        half = jnp.maximum(0.5 * up, OUTER_FLOOR)
        outer = jnp.where(half * (E2M1_MAX * fmt.top_scale) >= amax, half, up)
    return jnp.where(jnp.isfinite(amax), outer, jnp.nan)


def block_scales(top: jax.Array, u: jax.Array, fmt: Format) -> jax.Array:
    """Scale bytes [..., blocks] of FP32 blocks u [..., blocks, block], already divided by the
    outer scale; `top`: their largest absolute values."""
    if fmt.scale_type == "e8m0":
        return _encode_e8m0(top, fmt.scale_rule)
    to_six = _encode_e4m3_ratio(top, E2M1_MAX)
    if fmt.scale_rule == "six":
        return to_six
    to_four = _encode_e4m3(top / 4.0)
    unit = scale_of_values(to_six, fmt)
    less = _squared_error(u, to_four, unit, fmt) < _squared_error(u, to_six, unit, fmt)
    return jnp.where(less, to_four, to_six)


def _squared_error(u: jax.Array, scale_bytes: jax.Array, unit: jax.Array, fmt: Format) -> jax.Array:
    """Sum of squared errors a block, in (unit / 4096)**2, as int32.

    Integers add up alike in any order and without fused multiply-adds, so that
    near ties fall alike in every program. 16 * 8192**2 fits.
    """
    scale = scale_of_values(scale_bytes, fmt)
    error = jnp.abs(decode_e2m1(encode_e2m1(u, scale)) * scale - u)
    ticks = jnp.round(jnp.minimum(divide(error, unit), 2.0) * 4096).astype(jnp.int32)
    return jnp.sum(ticks * ticks, axis=-1)


# --- blocks along the last axis ------------------------------------------------


def num_blocks(n: int, fmt: Format) -> int:
    """Blocks needed for n values; the one formula for allocation and stride."""
    return -(-n // fmt.block)


def to_blocks(x: jax.Array, fmt: Format) -> jax.Array:
    """[..., n] to [..., blocks, block], padded with zeros at the end."""
    pad = num_blocks(x.shape[-1], fmt) * fmt.block - x.shape[-1]
    if pad:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
    return x.reshape(*x.shape[:-1], -1, fmt.block)


def from_blocks(blocks: jax.Array, n: int) -> jax.Array:
    """Inverse of `to_blocks`: [..., blocks, block] to [..., n]."""
    return blocks.reshape(*blocks.shape[:-2], -1)[..., :n]


class Scaled(NamedTuple):
    """FP32 values and their scales before any rounding.

    Attributes:
      x: FP32 [..., blocks, block]. u: the same, divided by the outer scale.
      amax: FP32, the largest absolute value(s) that share an outer scale, and `outer`, that
        scale; both [..., 1].
      top: FP32 [..., blocks], the largest absolute value of each block of u.
      scale_bytes: uint8 [..., blocks].
    """

    x: jax.Array
    u: jax.Array
    amax: jax.Array
    outer: jax.Array
    top: jax.Array
    scale_bytes: jax.Array


def scaled(x: jax.Array, fmt: Format, outer_axes: tuple[int, ...] = (-1,)) -> Scaled:
    """Scales of FP32 `x` [..., n]; `outer_axes`, the last one among them, share an outer scale.

    The values are read once for all maxima: a correctly rounded division keeps their order, so
    that the largest quotient is the quotient of the largest.
    """
    blocks = to_blocks(x, fmt)
    top = largest(blocks)
    amax = largest(top, outer_axes, keepdims=True)
    outer = outer_scale(amax, fmt)
    u, top = divide(blocks, outer[..., None]), divide(top, outer)
    return Scaled(blocks, u, amax, outer, top, block_scales(top, u, fmt))
