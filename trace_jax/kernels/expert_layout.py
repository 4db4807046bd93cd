"""Expert weights in the kernels' own layouts; made once a weight sync.

Layout "hopper": tiles of 16 outputs (8 of gate and 8 of up, or 16), each a run of chunks of 64
along K. An NVFP4 chunk is 512 bytes of codes and 64 of block scales, a BF16 chunk 2048 bytes:
a lane of a warp reads its operand of the tensor cores in one load; see cuda/expert_matmul.cu.
Layout "tpu": K-major codes and scales; see expert_matmul_tpu.py.
Layout "triton": rows as they come, codes as interlocked words; see expert_matmul_triton.py.

Block scales are kept as E5M3: bits (exponent + 10) << 3 | mantissa, so that every E4M3 value is
normal and all of E2M1 x scale is exact in BF16. MXFP4 takes the same bytes, one a 16 values, and
an outer scale that aligns an expert's largest block scale with 2^10: exact where the block
scales of an expert lie within 20 octaves; blocks below that become zero.
"""

import jax
import jax.numpy as jnp
from flax import struct

from trace_jax.fp4 import formats
from trace_jax.fp4.qtensor import QTensor
from trace_jax.kernels import dispatch, expert_matmul_tpu, triton_call
from trace_jax.kernels.bits import (
    codes_of,
    codes_of_weights,
    interlock,
    interlock_weights,
    to_e5m3,
)

_CHUNK = 64  # of K; see cuda/expert_matmul.cu
_BLOCK = 16  # values that share a scale in the layouts


@struct.dataclass
class ExpertWeights:
    """Weights of all experts in a kernel's layout.

    Attributes:
      data: uint8. Layout "hopper": [experts, tiles, chunks, bytes], codes and scales.
        Layout "tpu": codes [experts, parts, K/2, N], parts = gate and up or one.
        Layout "triton": codes [experts, parts, N, K/2] or BF16 bytes [experts, parts, N, 2 K].
      outer: FP32 [experts, 2], outer scale of a tile's first and second 8 outputs
        (gate and up, or twice the same).
      quantized, gated, k: static: FP4 or BF16; gate and up or plain; contraction length.
      scales: None, or block scales (E5M3): layout "tpu" [experts, parts, K/16, N], "triton"
        [experts, parts, N, K/16].
      layout: static, "hopper", "triton" or "tpu".
      bias: None, or FP32 [experts, tiles, 2, 8] in the order of a tile's outputs; layout
        "triton": [experts, parts, N].
    """

    data: jax.Array
    outer: jax.Array
    quantized: bool = struct.field(pytree_node=False)
    gated: bool = struct.field(pytree_node=False)
    k: int = struct.field(pytree_node=False)
    scales: jax.Array | None = None
    layout: str = struct.field(pytree_node=False, default="hopper")
    bias: jax.Array | None = None

    @property
    def outputs(self) -> int:
        """Width of the result: F for gated weights, N for plain ones."""
        if self.layout != "hopper":
            return self.data.shape[-1 if self.layout == "tpu" else 2]
        return self.data.shape[1] * (8 if self.gated else 16)


# --- codes and scales ----------------------------------------------------------------------


_MX_OCTAVES = 20  # that E5M3 and BF16 leave below the largest block scale


def without_zero_scales(packed: jax.Array, scale_bytes: jax.Array, block_bytes: int) -> jax.Array:
    """Packed codes with code 0 wherever the block scale is zero, since E5M3 has no zero."""
    return jnp.where(jnp.repeat(scale_bytes == 0, block_bytes, axis=-1), jnp.uint8(0), packed)


def _nvfp4(q: QTensor) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes, E5M3 scale bytes a 16 values and outer scales [experts] of an NVFP4 weight."""
    if q.outer.size != q.packed.shape[0]:
        raise ValueError(f"expert weights: {q.outer.size} outer scales; give one an expert")
    nan = jnp.any((q.block_scale & 127) == 127, axis=(1, 2))  # E5M3 has none
    outer = jnp.where(nan, jnp.nan, q.outer.reshape(-1)).astype(jnp.float32)
    packed = without_zero_scales(q.packed, q.block_scale, _BLOCK // 2)
    return packed, to_e5m3(q.block_scale), outer


def _mxfp4(q: QTensor) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same of an MXFP4 weight, whose blocks have 32 values."""
    top = jnp.max(q.block_scale, axis=(1, 2), keepdims=True).astype(jnp.int32)
    exponent = q.block_scale.astype(jnp.int32) - top + _MX_OCTAVES
    lost = jnp.repeat(exponent < 0, q.format.block // 2, axis=-1)
    packed = jnp.where(lost, jnp.uint8(0), q.packed)
    scales = jnp.repeat(jnp.maximum(exponent, 0) << 3, q.format.block // _BLOCK, axis=-1)
    # 2^(top - 127 - 10) from its bits; 255 is NaN.
    bits = jnp.maximum(top.reshape(-1) - 10, 0) << 23
    outer = jax.lax.bitcast_convert_type(bits, jnp.float32) * q.outer.reshape(-1)
    outer = jnp.where(top.reshape(-1) == 255, jnp.nan, outer)
    return packed, scales.astype(jnp.uint8), outer


def _tiled(first: jax.Array, second: jax.Array | None = None) -> jax.Array:
    """[experts, rows, m] to [experts, tiles, 2, 8, m]: a tile's two groups of 8 outputs."""
    if second is None:
        return first.reshape(first.shape[0], -1, 2, 8, first.shape[-1])
    parts = [a.reshape(a.shape[0], -1, 8, a.shape[-1]) for a in (first, second)]
    return jnp.stack(parts, axis=2)


def _chunks(k: int) -> int:
    return -(-k // _CHUNK)


def _lay_out_fp4(packed: jax.Array, scales: jax.Array) -> jax.Array:
    """Tiled bytes to chunks of 576 bytes: 32 lanes x 16 bytes of codes, then 2 x 32 scales.

    Lane 4 g + t holds outputs g and g + 8 and the 16 values of K from 16 t on.
    """
    e, tiles = packed.shape[:2]
    chunks = _chunks(packed.shape[-1] * 2)
    pad = [(0, 0)] * 4
    packed = jnp.pad(packed, [*pad, (0, chunks * 32 - packed.shape[-1])])
    scales = jnp.pad(scales, [*pad, (0, chunks * 4 - scales.shape[-1])])
    words = interlock_weights(packed.reshape(e, tiles, 2, 8, chunks, 4, 2, 4))
    words = words.transpose(0, 1, 4, 3, 5, 2, 6)  # e, tile, chunk, g, t, half, word
    codes = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(e, tiles, chunks, 512)
    scales = scales.reshape(e, tiles, 2, 8, chunks, 4).transpose(0, 1, 4, 2, 3, 5)
    return jnp.concatenate([codes, scales.reshape(e, tiles, chunks, 64)], axis=-1)


def _lay_out_bf16(weight: jax.Array) -> jax.Array:
    """Tiled BF16 to chunks of 2048 bytes: four steps of K, each 32 lanes x 16 bytes."""
    e, tiles = weight.shape[:2]
    chunks = _chunks(weight.shape[-1])
    weight = jnp.pad(weight, [(0, 0)] * 4 + [(0, chunks * _CHUNK - weight.shape[-1])])
    parts = weight.reshape(e, tiles, 2, 8, chunks, 4, 4, 2, 2)  # half, g, chunk, t, step, pair, 2
    parts = parts.transpose(0, 1, 4, 6, 3, 5, 7, 2, 8)
    return jax.lax.bitcast_convert_type(parts, jnp.uint8).reshape(e, tiles, chunks, 2048)


def _rows(parts: tuple[jax.Array, ...], multiple: int) -> jax.Array:
    """Bytes [experts, N, m] of the parts as [experts, parts, N, m'], m padded to a multiple."""
    both = jnp.stack(parts, axis=1)
    return jnp.pad(both, [(0, 0)] * 3 + [(0, -both.shape[-1] % multiple)])


def _bf16_rows(weight: jax.Array, up: jax.Array | None) -> jax.Array:
    both = _rows((weight,) if up is None else (weight, up), _CHUNK)
    return jax.lax.bitcast_convert_type(both, jnp.uint8).reshape(*both.shape[:-1], -1)


def _lay_out_words(packed: tuple[jax.Array, ...]) -> jax.Array:
    both = _rows(packed, _CHUNK // 2)
    words = interlock(both.reshape(*both.shape[:-1], -1, 4))
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(both.shape)


# --- to the layouts --------------------------------------------------------------------------


def lay_out(
    weight: QTensor | jax.Array,
    up: QTensor | jax.Array | None = None,
    layout: str = "auto",
    *,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
) -> ExpertWeights:
    """The kernel's layout of expert weights [experts, N, K], K contracted.

    Args:
      weight: NVFP4 `QTensor` with one outer scale an expert, MXFP4 `QTensor`, or a BF16 array;
        the gate's weights when `up` is given.
      up: the up projection's weights, of the same kind and shape: makes gated weights.
      layout: "hopper", "triton", "tpu" (FP4 only, no bias), or "auto": "tpu" on a TPU, "triton"
        on a GPU that is no Hopper, else "hopper".
      bias, up_bias: [experts, N] to add to the products, before an activation; both or none.

    Raises:
      ValueError: outputs that are no multiple of 16 (gated: 8), K that is no multiple of 16,
        outer scales that are not one an expert, or what the layout does not take.
    """
    if layout == "auto":
        layout = "tpu" if dispatch.platform() == "tpu" else triton_call.gpu_layout()
    if layout not in ("hopper", "triton", "tpu"):
        raise ValueError(f"expert weights: no layout {layout!r}; write auto, hopper, triton or tpu")
    _check(weight, up, bias, up_bias, layout)
    gated = up is not None
    static = dict(gated=gated, k=weight.shape[-1], layout=layout)
    if bias is not None:
        both = [b.astype(jnp.float32)[..., None] for b in (bias, up_bias) if b is not None]
        both = _rows(both, 1) if layout == "triton" else _tiled(*both)
        static["bias"] = both[..., 0]
    if not isinstance(weight, QTensor):
        outer = jnp.ones((weight.shape[0], 2), jnp.float32)
        data = _bf16_rows(weight, up) if layout == "triton" else _lay_out_bf16(_tiled(weight, up))
        return ExpertWeights(data, outer, False, **static)
    convert = _nvfp4 if weight.format.scale_type == "e4m3" else _mxfp4
    parts = [convert(q) for q in ((weight, up) if gated else (weight,))]
    packed, scales, outer = zip(*parts, strict=True)
    outer = jnp.stack([outer[0], outer[-1]], axis=-1)
    if layout == "tpu":
        data, scales = expert_matmul_tpu.lay_out_nvfp4(
            jnp.stack(packed, axis=1), jnp.stack(scales, axis=1)
        )
        return ExpertWeights(data, outer, True, scales=scales, **static)
    if layout == "triton":
        scales = _rows(scales, _CHUNK // _BLOCK)
        return ExpertWeights(_lay_out_words(packed), outer, True, scales=scales, **static)
    return ExpertWeights(_lay_out_fp4(_tiled(*packed), _tiled(*scales)), outer, True, **static)


def _check(weight, up, bias, up_bias, layout: str) -> None:
    multiple = 16 if up is None else 8
    if weight.shape[1] % multiple:
        raise ValueError(
            f"expert weights: {weight.shape[1]} outputs; give a multiple of {multiple}"
        )
    if weight.shape[-1] % 16:
        raise ValueError(f"expert weights: K is {weight.shape[-1]}; give a multiple of 16")
    if (up_bias is None) != (up is None or bias is None):
        raise ValueError("expert weights: give bias and up_bias for gated weights, or neither")
    if layout == "tpu" and not isinstance(weight, QTensor):
        raise ValueError("expert weights: layout 'tpu' takes FP4, not BF16; write 'hopper'")
    if layout == "tpu" and bias is not None:
        raise ValueError("expert weights: layout 'tpu' takes no bias; write 'hopper'")


# --- back from the layouts -----------------------------------------------------------------


def decode_layout(weights: ExpertWeights) -> jax.Array:
    """FP32 [experts, 2 F or N, K] without outer scales, from the layout: for tests and the
    reference. Gated: gate rows, then up rows."""
    if weights.layout == "tpu":
        return _decode_tpu_layout(weights)
    if weights.layout == "triton":
        return _decode_rows(weights)
    e, tiles, chunks, _ = weights.data.shape
    if weights.quantized:
        words = jax.lax.bitcast_convert_type(
            weights.data[..., :512].reshape(e, tiles, chunks, 8, 4, 2, 2, 4), jnp.uint32
        )
        value = formats.decode_e2m1(codes_of_weights(words))  # e, tile, chunk, g, t, half, word, 8
        scale = weights.data[..., 512:].reshape(e, tiles, chunks, 2, 8, 4)
        scale = scale.transpose(0, 1, 2, 4, 5, 3)[..., None, None]
        value = value * _scale_values(scale)
        value = value.transpose(0, 1, 5, 3, 2, 4, 6, 7)
    else:
        parts = weights.data.reshape(e, tiles, chunks, 4, 8, 4, 2, 2, 2, 2)
        value = jax.lax.bitcast_convert_type(parts, jnp.bfloat16).astype(jnp.float32)
        value = value.transpose(0, 1, 7, 4, 2, 5, 3, 6, 8)  # half, g, chunk, t, step, pair, 2
    value = value.reshape(e, tiles, 2, 8, chunks * _CHUNK)[..., : weights.k]
    if weights.gated:
        value = value.transpose(0, 2, 1, 3, 4)
    return value.reshape(e, -1, weights.k)


def _scale_values(e5m3: jax.Array) -> jax.Array:
    """FP32 values of E5M3 bytes."""
    bits = (e5m3.astype(jnp.uint32) + ((127 - 10) << 3)) << 20
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _decode_tpu_layout(weights: ExpertWeights) -> jax.Array:
    codes = formats.unpack(weights.data.swapaxes(-1, -2))  # experts, parts, N, K
    blocks = formats.decode_e2m1(codes).reshape(*codes.shape[:-1], -1, 16)
    value = blocks * _scale_values(weights.scales.swapaxes(-1, -2))[..., None]
    return value.reshape(codes.shape[0], -1, codes.shape[-1])


def _decode_rows(weights: ExpertWeights) -> jax.Array:
    shape = weights.data.shape
    if weights.quantized:
        words = jax.lax.bitcast_convert_type(weights.data.reshape(*shape[:-1], -1, 4), jnp.uint32)
        value = formats.decode_e2m1(codes_of(words)).reshape(*shape[:-1], -1, _BLOCK)
        value = value * _scale_values(weights.scales)[..., None]
    else:
        pairs = weights.data.reshape(*shape[:-1], -1, 2)
        value = jax.lax.bitcast_convert_type(pairs, jnp.bfloat16).astype(jnp.float32)
    return value.reshape(shape[0], shape[1] * shape[2], -1)[..., : weights.k]


def decode_bias(weights: ExpertWeights) -> jax.Array | None:
    """Biases FP32 [experts, 2 F or N] in the order of `decode_layout`, or None."""
    if weights.bias is None:
        return None
    tiles = weights.gated and weights.layout == "hopper"
    parts = weights.bias.transpose(0, 2, 1, 3) if tiles else weights.bias
    return parts.reshape(parts.shape[0], -1)
