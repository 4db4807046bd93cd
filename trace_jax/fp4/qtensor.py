"""QTensor: an FP4 array as it is stored and sent."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from trace_jax.fp4 import formats
from trace_jax.fp4.formats import Format
from trace_jax.fp4.rounding import NEAREST, fp4_round, straight_through


@struct.dataclass
class QTensor:
    """An FP4 array.

    Reconstruction: value[..., i] = E2M1(code[..., i]) * block_scale[..., i // block] * outer.

    Attributes:
      packed: uint8 [..., blocks * block / 2]; two codes a byte, low nibble first.
        The quantized axis is the last one; a short last block is padded with
        code 0.
      block_scale: uint8 [..., blocks]; the bytes of E4M3 or E8M0 numbers.
      outer: FP32, broadcastable against [..., 1]; 1 where the format has none.
      format, axis, length, dtype: static. `axis` (negative) is where the
        quantized axis, of `length` values, stands in the decoded array;
        `dtype` is the decoded dtype.
    """

    packed: jax.Array
    block_scale: jax.Array
    outer: jax.Array
    format: Format = struct.field(pytree_node=False)
    axis: int = struct.field(pytree_node=False)
    length: int = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded array."""
        rows = list(self.packed.shape[:-1])
        rows.insert(len(rows) + 1 + self.axis, self.length)
        return tuple(rows)

    @property
    def codes(self) -> jax.Array:
        """uint8 codes [..., length], quantized axis last."""
        return formats.unpack(self.packed)[..., : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes that travel: codes, block scales and outer scales."""
        return self.packed.size + self.block_scale.size + 4 * self.outer.size


def row_axes(x: jax.Array) -> tuple[int, ...]:
    """`outer_axes` for one outer scale a row (the last axis): activations, KV."""
    return (x.ndim - 1,)


def _scaled(x, fmt: Format, outer_axes: Sequence[int] | None) -> formats.Scaled:
    axes = tuple(range(x.ndim)) if outer_axes is None else tuple(outer_axes)
    return formats.scaled(formats.fp32_source(x), fmt, axes)


def quantize(
    x: jax.Array, format: Format, *, axis: int = -1, outer_axes: Sequence[int] | None = None
) -> QTensor:
    """`x` in FP4, rounded to nearest (ties to even).

    Args:
      x: floating-point array with at least one axis. Round it to BF16 first
        where the values are those of a BF16 model: that is the source which
        both sides of a rollout share.
      format: `NVFP4`, `MXFP4` or a variant of them.
      axis: the axis along which blocks run; the contraction axis of a weight.
      outer_axes: axes over which one outer scale is shared, counted in the
        array whose quantized axis is last. None: all axes (one a tensor).

    Raises:
      ValueError: x is not floating point or has no axis.

    NaN or Inf in the reach of a scale makes that scale NaN, so it decodes to
    NaN and is seen.
    """
    _check(x)
    moved = jnp.moveaxis(x, axis, -1)
    s = _scaled(moved, format, outer_axes)
    codes = formats.encode_e2m1(s.u, formats.scale_of_values(s.scale_bytes, format))
    return QTensor(
        packed=formats.pack(codes.reshape(*codes.shape[:-2], -1)),
        block_scale=s.scale_bytes,
        outer=s.outer,
        format=format,
        axis=axis if axis < 0 else axis - x.ndim,
        length=moved.shape[-1],
        dtype=jnp.dtype(x.dtype),
    )


def unscaled(q: QTensor, dtype=jnp.bfloat16) -> jax.Array:
    """code x block scale, without the outer scale; exact in BF16. Quantized axis last."""
    codes = formats.to_blocks(formats.unpack(q.packed), q.format)
    values = formats.decode_e2m1(codes) * formats.scale_of_values(q.block_scale, q.format)
    return formats.from_blocks(values, q.length).astype(dtype)


def dequantize(q: QTensor, dtype=None) -> jax.Array:
    """The array that `q` stands for, in `dtype` (default: that of the source)."""
    value = jnp.moveaxis(unscaled(q, jnp.float32) * q.outer, -1, q.axis)
    dtype = jnp.dtype(dtype or q.dtype)
    return formats.fp32_source(value, dtype).astype(dtype)


def fake_quant(
    x: jax.Array, format: Format, *, axis: int = -1, outer_axes: Sequence[int] | None = None
) -> jax.Array:
    """`dequantize(quantize(x))`, bit for bit, with a straight-through gradient.

    Same arguments and errors as `quantize`.
    """
    _check(x)
    moved = jnp.moveaxis(x, axis, -1)
    value, outer = fake_quant_unscaled(jax.lax.stop_gradient(moved), format, outer_axes=outer_axes)
    value = jnp.moveaxis(value * outer, -1, axis)
    return straight_through(x, formats.fp32_source(value, x.dtype).astype(x.dtype))


def fake_quant_unscaled(
    x: jax.Array, format: Format, *, outer_axes: Sequence[int] | None = None
) -> tuple[jax.Array, jax.Array]:
    """FP32 code x block scale of `x` (blocks on the last axis) and the outer scale.

    The trainer's form of `unscaled(quantize(x)), outer`: straight-through, so
    that d(value * outer)/dx = 1.
    """
    s = _scaled(jax.lax.stop_gradient(x), format, outer_axes)
    value, _ = fp4_round(NEAREST, s.u, formats.scale_of_values(s.scale_bytes, format))
    return _unscaled_through(x, formats.from_blocks(value, x.shape[-1]), s.outer), s.outer


@jax.custom_vjp
def _unscaled_through(x: jax.Array, value: jax.Array, outer: jax.Array) -> jax.Array:
    """FP32 `value`; the gradient goes to `x` (of its shape), divided by `outer`."""
    return value


_unscaled_through.defvjp(
    lambda x, value, outer: (value, (outer, jnp.zeros(0, x.dtype))),
    lambda kept, g: (formats.divide(g, kept[0]).astype(kept[1].dtype), None, None),
)


def _check(x) -> None:
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise ValueError(f"FP4 takes floating-point arrays, not {jnp.result_type(x)}")
    if jnp.ndim(x) == 0:
        raise ValueError("FP4 takes arrays with at least one axis, not a scalar")
