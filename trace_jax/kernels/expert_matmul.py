"""Products of routed tokens with their experts' weights, for decode.

    routing = route(expert_ids, num_experts)
    mid = expert_matmul(x, gate_up, routing, activation="silu")     # BF16 [rows, F]
    out = expert_matmul(mid, down, routing)                         # FP32 [slots, N]
    y = (out.reshape(tokens, top_k, N) * gate_weights[..., None]).sum(1)

A slot is (token, choice), numbered token * top_k + choice; a row is a slot in the order of
its expert. Nothing is padded and nothing is dropped; shapes depend on tokens and top_k alone.

Contract of `expert_matmul`, for every version:
  out[row] = f(sum_k value[expert(row), n, k] * x[source(row), k] * x_outer[source(row)])
  with value = E2M1 code x block scale x outer scale (NVFP4 weights) or the BF16 weight.
  The sum runs over exact products (code x block scale is exact in BF16) in FP32; outer scales
  multiply the FP32 sum. W4A4 is the same call with x holding quantized values: they are exact
  in BF16, with or without their power-of-two outer scale, which may be given as `x_outer`.
  Gated weights: f is the gated activation, in FP32, rounded once to BF16; source(row) is the
  row's token; the result is in row order. Plain weights: f is the identity; source(row) is
  the row; the result is FP32 in slot order.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from trace_jax.fp4 import formats
from trace_jax.fp4.qtensor import QTensor
from trace_jax.kernels import cuda_build, dispatch, expert_matmul_tpu

Activation = Literal["silu", "clamped_swiglu"]
_EPILOGUE = {None: 0, "silu": 1, "clamped_swiglu": 2}
_CHUNK = 64  # of K; see cuda/expert_matmul.cu
# Chunks along K that the CUDA kernel is compiled for; K is padded with zeros to the next.
_CHUNKS = (4, 8, 12, 16, 24, 32, 48, 64)


class Routing(NamedTuple):
    """Slots ordered by expert.

    Attributes:
      slot: int32 [tokens * top_k], the slot of each row.
      offset: int32 [experts + 1], the first row of each expert; the last is the row count.
    """

    slot: jax.Array
    offset: jax.Array


@struct.dataclass
class ExpertWeights:
    """Weights of all experts in the kernel's own layout; made once a weight sync.

    Attributes:
      data: uint8. Layout "hopper": [experts, tiles, chunks, bytes], codes and scales.
        Layout "tpu": codes [experts, parts, K/2, N], parts = gate and up or one.
      scales: None, or with layout "tpu" the block scales (E5M3) [experts, parts, K/16, N].
      outer: FP32 [experts, 2], outer scale of a tile's first and second 8 outputs
        (gate and up, or twice the same).
      quantized, gated, k: static: NVFP4 or BF16; gate and up or plain; contraction length.
      layout: static, "hopper" or "tpu".
    """

    data: jax.Array
    outer: jax.Array
    quantized: bool = struct.field(pytree_node=False)
    gated: bool = struct.field(pytree_node=False)
    k: int = struct.field(pytree_node=False)
    scales: jax.Array | None = None
    layout: str = struct.field(pytree_node=False, default="hopper")

    @property
    def outputs(self) -> int:
        """Width of the result: F for gated weights, N for plain ones."""
        if self.layout == "tpu":
            return self.data.shape[-1]
        return self.data.shape[1] * (8 if self.gated else 16)


# --- routing ---------------------------------------------------------------------------


def _route_reference(expert_ids: jax.Array, num_experts: int) -> Routing:
    flat = expert_ids.reshape(-1)
    slot = jnp.argsort(flat, stable=True).astype(jnp.int32)
    offset = jnp.searchsorted(flat[slot], jnp.arange(num_experts + 1)).astype(jnp.int32)
    return Routing(slot, offset)


def _route_hopper(expert_ids: jax.Array, num_experts: int) -> Routing:
    out = (
        jax.ShapeDtypeStruct((expert_ids.size,), jnp.int32),
        jax.ShapeDtypeStruct((num_experts + 1,), jnp.int32),
    )
    return Routing(*jax.ffi.ffi_call(cuda_build.register("route"), out)(expert_ids.reshape(-1)))


ROUTE_VERSIONS = {"reference": _route_reference, "hopper": _route_hopper}


def route(expert_ids: jax.Array, num_experts: int, version: str = "auto") -> Routing:
    """Orders slots by expert, stably.

    Args:
      expert_ids: int32 [tokens, top_k], each in 0..num_experts-1.
    """
    refusals = {"reference": lambda: None, "hopper": cuda_build.hopper_refusal}
    name = dispatch.choose("route", version, refusals, {"gpu": ("hopper",)})
    return ROUTE_VERSIONS[name](expert_ids, num_experts)


# --- layout ------------------------------------------------------------------------------


def _padded_chunks(k: int) -> int:
    chunks = -(-k // _CHUNK)
    for size in _CHUNKS:
        if chunks <= size:
            return size
    raise ValueError(f"expert weights: K is {k}; the kernel layout takes up to {_CHUNKS[-1] * 64}")


def interlock(packed: jax.Array) -> jax.Array:
    """Bytes [..., 4] of 8 codes to uint32 [...]: pair p at the BF16 bit positions, shifted by 3p.

    The last pair takes the bits that are left over, so that unpacking costs a shift and a mask.
    """
    word = jnp.zeros(packed.shape[:-1], jnp.uint32)
    for pair in range(4):
        byte = packed[..., pair].astype(jnp.uint32)
        for half, code in enumerate((byte & 15, byte >> 4)):
            if pair < 3:
                bits = ((code & 8) << 12 | (code & 7) << 6) >> (3 * pair)
            else:
                bits = (code & 12) << 11 | (code & 3) << 10
            word |= bits << (16 * half)
    return word


# E4M3 bytes to E5M3 ((exponent + 10) << 3 | mantissa), where none is subnormal.
_E5M3 = np.array([0, 8, 16, 20, 24, 26, 28, 30] + [b + 24 for b in range(8, 128)], np.uint8)


def to_e5m3(scale_bytes: jax.Array) -> jax.Array:
    """E4M3 scale bytes (sign clear) as the kernels' E5M3 bytes; a zero stays 0."""
    return jnp.asarray(_E5M3)[scale_bytes & 127]


def without_zero_scales(packed: jax.Array, scale_bytes: jax.Array, block_bytes: int) -> jax.Array:
    """Packed codes with code 0 wherever the block scale is zero, since E5M3 has no zero."""
    return jnp.where(jnp.repeat(scale_bytes == 0, block_bytes, axis=-1), jnp.uint8(0), packed)


def _tiled(first: jax.Array, second: jax.Array | None) -> jax.Array:
    """[experts, rows, m] to [experts, tiles, 2, 8, m]: a tile's two groups of 8 outputs."""
    if second is None:
        return first.reshape(first.shape[0], -1, 2, 8, first.shape[-1])
    parts = [a.reshape(a.shape[0], -1, 8, a.shape[-1]) for a in (first, second)]
    return jnp.stack(parts, axis=2)


def _lay_out_nvfp4(packed: jax.Array, scales: jax.Array) -> jax.Array:
    """Tiled bytes to chunks of 576 bytes: 32 lanes x 16 bytes of codes, then x 2 scales.

    Lane 4 g + t holds outputs g and g + 8 and the 16 values of K from 16 t on.
    """
    e, tiles = packed.shape[:2]
    chunks = _padded_chunks(packed.shape[-1] * 2)
    pad = [(0, 0)] * 4
    packed = jnp.pad(packed, [*pad, (0, chunks * 32 - packed.shape[-1])])
    scales = jnp.pad(scales, [*pad, (0, chunks * 4 - scales.shape[-1])])
    words = interlock(packed.reshape(e, tiles, 2, 8, chunks, 4, 2, 4))
    words = words.transpose(0, 1, 4, 3, 5, 2, 6)  # e, tile, chunk, g, t, half, word
    codes = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(e, tiles, chunks, 512)
    scales = to_e5m3(scales).reshape(e, tiles, 2, 8, chunks, 4).transpose(0, 1, 4, 3, 5, 2)
    return jnp.concatenate([codes, scales.reshape(e, tiles, chunks, 64)], axis=-1)


def _lay_out_bf16(weight: jax.Array) -> jax.Array:
    """Tiled BF16 to chunks of 2048 bytes: four steps of K, each 32 lanes x 16 bytes."""
    e, tiles = weight.shape[:2]
    chunks = _padded_chunks(weight.shape[-1])
    weight = jnp.pad(weight, [(0, 0)] * 4 + [(0, chunks * _CHUNK - weight.shape[-1])])
    parts = weight.reshape(e, tiles, 2, 8, chunks, 4, 4, 2, 2)  # half, g, chunk, t, step, pair, 2
    parts = parts.transpose(0, 1, 4, 6, 3, 5, 7, 2, 8)
    return jax.lax.bitcast_convert_type(parts, jnp.uint8).reshape(e, tiles, chunks, 2048)


def _check_rows(rows: int, multiple: int) -> None:
    if rows % multiple:
        raise ValueError(f"expert weights: {rows} outputs; give a multiple of {multiple}")


def lay_out(
    weight: QTensor | jax.Array, up: QTensor | jax.Array | None = None, layout: str = "auto"
) -> ExpertWeights:
    """The kernel's layout of expert weights [experts, N, K], K contracted.

    Args:
      weight: NVFP4 `QTensor` with one outer scale an expert, or a BF16 array; the gate's
        weights when `up` is given.
      up: the up projection's weights, of the same kind and shape: makes gated weights.
      layout: "hopper", "tpu" (NVFP4 only), or "auto": "tpu" on a TPU, else "hopper".

    Raises:
      ValueError: outputs that are no multiple of 16 (gated: 8), K above 4096 or no multiple
        of 16, another format, or outer scales that are not one an expert.
    """
    if layout == "auto":
        layout = "tpu" if dispatch.platform() == "tpu" else "hopper"
    if layout not in ("hopper", "tpu"):
        raise ValueError(f"expert weights: no layout {layout!r}; write auto, hopper or tpu")
    _check_rows(weight.shape[1], 16 if up is None else 8)
    k, gated = weight.shape[-1], up is not None
    if k % 16:
        raise ValueError(f"expert weights: K is {k}; the layout takes multiples of 16")
    if not isinstance(weight, QTensor):
        if layout == "tpu":
            raise ValueError("expert weights: layout 'tpu' takes NVFP4, not BF16")
        outer = jnp.ones((weight.shape[0], 2), jnp.float32)
        return ExpertWeights(_lay_out_bf16(_tiled(weight, up)), outer, False, gated, k)
    both = [weight, weight if up is None else up]
    for q in both:
        if q.format.scale_type != "e4m3":
            raise ValueError(f"expert weights: format {q.format.name}; the layout takes NVFP4")
        if q.outer.size != q.packed.shape[0]:
            raise ValueError(f"expert weights: {q.outer.size} outer scales; give one an expert")
    packed = [without_zero_scales(q.packed, q.block_scale, 8) for q in both]
    outer = jnp.stack([_seen(q) for q in both], axis=-1)
    if layout == "tpu":
        parts = 2 if gated else 1
        data, scales = expert_matmul_tpu.lay_out_nvfp4(
            jnp.stack(packed[:parts], axis=1),
            to_e5m3(jnp.stack([q.block_scale for q in both[:parts]], axis=1)),
        )
        return ExpertWeights(data, outer, True, gated, k, scales, "tpu")
    codes = _tiled(packed[0], packed[1] if gated else None)
    scales = _tiled(weight.block_scale, up.block_scale if gated else None)
    return ExpertWeights(_lay_out_nvfp4(codes, scales), outer, True, gated, k)


def _seen(q: QTensor) -> jax.Array:
    """Outer scales [experts], NaN where a block scale is NaN: E5M3 has none."""
    nan = jnp.any((q.block_scale & 127) == 127, axis=(1, 2))
    return jnp.where(nan, jnp.nan, q.outer.reshape(-1)).astype(jnp.float32)


def decode_layout(weights: ExpertWeights) -> jax.Array:
    """FP32 [experts, 2 F or N, K] without outer scales, from the layout: for tests and the
    reference. Gated: gate rows, then up rows."""
    if weights.layout == "tpu":
        return _decode_tpu_layout(weights)
    e, tiles, chunks, _ = weights.data.shape
    if weights.quantized:
        words = jax.lax.bitcast_convert_type(
            weights.data[..., :512].reshape(e, tiles, chunks, 8, 4, 2, 2, 4), jnp.uint32
        )
        value = _decode_words(words)  # e, tile, chunk, g, t, half, word, 8
        scale = weights.data[..., 512:].reshape(e, tiles, chunks, 8, 4, 2, 1, 1)
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


def _decode_words(words: jax.Array) -> jax.Array:
    """Interlocked uint32 [...] to FP32 E2M1 values [..., 8]."""
    values = []
    for pair in range(4):
        for half in range(2):
            w = (words >> (16 * half)) & 0xFFFF
            if pair < 3:
                bits = (w << (3 * pair)) & 0x81C0
                code = bits >> 12 & 8 | bits >> 6 & 7
            else:
                code = w >> 11 & 12 | w >> 10 & 3
            values.append(formats.decode_e2m1(code.astype(jnp.uint8)))
    return jnp.stack(values, axis=-1)


# --- products ------------------------------------------------------------------------------


def gated_activation(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """FP32: silu(gate) * up, or GPT-OSS's form (gate at most 7, up in -7..7, plus one)."""
    if activation == "silu":
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)


def _reference(x, weights, routing, x_outer, activation):
    value = decode_layout(weights)
    rows = routing.slot.shape[0]
    source = jnp.arange(rows)
    if weights.gated:
        source = routing.slot // (rows // x.shape[0])
    sizes = jnp.diff(routing.offset)
    out = jax.lax.ragged_dot(
        x[source].astype(jnp.float32), value.transpose(0, 2, 1), sizes,
        precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip
    if x_outer is not None:
        out = out * x_outer[source][:, None]
    expert = jnp.searchsorted(routing.offset, jnp.arange(rows), side="right") - 1
    outer = weights.outer[expert]
    if not weights.gated:
        return jnp.zeros_like(out).at[routing.slot].set(out * outer[:, :1])
    gate, up = jnp.split(out, 2, axis=-1)
    value = gated_activation(gate * outer[:, :1], up * outer[:, 1:], activation)
    return value.astype(jnp.bfloat16)


def _hopper(x, weights, routing, x_outer, activation, variant=None):
    rows, experts = routing.slot.shape[0], weights.data.shape[0]
    dtype = jnp.bfloat16 if weights.gated else jnp.float32
    out = jax.ShapeDtypeStruct((rows, weights.outputs), dtype)
    if variant is None:
        variant = hopper_variant(weights.quantized, weights.data.shape[2], rows / experts)
    call = jax.ffi.ffi_call(cuda_build.register("expert_matmul"), out)
    return call(
        weights.data, weights.outer, x,
        jnp.zeros(0, jnp.float32) if x_outer is None else x_outer.reshape(-1),
        routing.slot, routing.offset,
        variant=np.int64(variant), epilogue=np.int64(_EPILOGUE[activation]),
        tiles=np.int64(weights.data.shape[1]), top_k=np.int64(rows // x.shape[0]),
    )  # fmt: skip


def _tpu(x, weights, routing, x_outer, activation, interpret=False):
    rows = routing.slot.shape[0]
    if weights.gated:
        source = routing.slot // (rows // x.shape[0])
        x, x_outer = x[source], None if x_outer is None else x_outer[source]
    activate = None if activation is None else partial(gated_activation, activation=activation)
    out = expert_matmul_tpu.expert_matmul(
        x, weights.data, weights.scales, weights.outer, routing.offset, x_outer, activate, interpret
    )
    return out if weights.gated else jnp.zeros_like(out).at[routing.slot].set(out)


VERSIONS = {
    "reference": _reference,
    "hopper": _hopper,
    "pallas_tpu": _tpu,
    "pallas_interpret": partial(_tpu, interpret=True),
}


def _pallas_refusal(x, weights) -> str | None:
    if x.dtype != jnp.bfloat16:
        return f"it takes BF16 activations, not {x.dtype}"
    if weights.layout != "tpu":
        return f"it takes weights in the layout 'tpu', not {weights.layout!r}"
    if expert_matmul_tpu.block_of(weights.outputs) is None:
        return f"it takes outputs that are a multiple of 128, not {weights.outputs}"
    if weights.k % 256:
        return f"it takes K that is a multiple of 256, not {weights.k}"
    return None


def _tpu_refusal(x, weights) -> str | None:
    if dispatch.platform() != "tpu":
        return f"it needs a TPU; the platform is {dispatch.platform()}"
    return _pallas_refusal(x, weights)


def _hopper_refusal(x, weights) -> str | None:
    if weights.layout != "hopper":
        return f"it takes weights in the layout 'hopper', not {weights.layout!r}"
    if x.dtype != jnp.bfloat16:
        return f"it takes BF16 activations, not {x.dtype}"
    if weights.data.shape[0] > 512:
        return f"it takes up to 512 experts, not {weights.data.shape[0]}"
    if hopper_variant(weights.quantized, weights.data.shape[2], 1.0) is None:
        return f"it takes BF16 weights with K up to 3072, not {weights.k}"
    return cuda_build.hopper_refusal()


def expert_matmul(
    x: jax.Array,
    weights: ExpertWeights,
    routing: Routing,
    *,
    x_outer: jax.Array | None = None,
    activation: Activation | None = None,
    version: str = "auto",
) -> jax.Array:
    """Each row's source times the weights of its expert; the module docstring is the contract.

    Args:
      x: BF16 [tokens, K] for gated weights, [rows, K] in row order for plain ones.
      weights: from `lay_out`.
      routing: from `route`.
      x_outer: FP32 [tokens] or [rows], outer scales of x; None if x carries them.
      activation: of gated weights; None for plain ones.
      version: "auto", "reference", "hopper", "pallas_tpu", or "pallas_interpret" (the TPU
        kernel, interpreted: slow, anywhere).

    Returns:
      Gated: BF16 [rows, F] in row order. Plain: FP32 [tokens * top_k, N] in slot order.

    Raises:
      ValueError: shapes or activation that do not fit the weights, or a version that
        cannot run this call.
    """
    rows = routing.slot.shape[0]
    if x.shape[-1] != weights.k:
        raise ValueError(f"expert_matmul: x has K = {x.shape[-1]}, the weights {weights.k}")
    if (activation is not None) != weights.gated or activation not in _EPILOGUE:
        raise ValueError(
            f"expert_matmul: activation {activation!r} with {'gated' if weights.gated else 'plain'}"
            " weights; write silu or clamped_swiglu for gated weights, None for plain ones"
        )
    if rows % x.shape[0] or (not weights.gated and x.shape[0] != rows):
        raise ValueError(f"expert_matmul: {x.shape[0]} rows of x do not fit {rows} routed rows")
    refusals = {
        "reference": lambda: None,
        "hopper": lambda: _hopper_refusal(x, weights),
        "pallas_tpu": lambda: _tpu_refusal(x, weights),
        "pallas_interpret": lambda: _pallas_refusal(x, weights),
    }
    best = {"gpu": ("hopper",), "tpu": ("pallas_tpu",)}
    name = dispatch.choose("expert_matmul", version, refusals, best)
    return VERSIONS[name](x, weights, routing, x_outer, activation)


# The kernels that cuda/expert_matmul.cu compiles, in its order:
# (NVFP4?, chunks of K, smallest rows an expert on average for which it is chosen).
HOPPER_VARIANTS = (
    (True, 4, 0.0), (True, 8, 0.0), (True, 12, 0.0), (True, 16, 0.0), (True, 24, 0.0),
    (True, 32, 0.0), (True, 32, 0.5), (True, 32, 2.0), (True, 48, 0.0), (True, 64, 0.0),
    (False, 4, 0.0), (False, 8, 0.0), (False, 12, 0.0), (False, 12, 2.0), (False, 16, 0.0),
    (False, 24, 0.0), (False, 32, 0.0), (False, 48, 0.0),
)  # fmt: skip


def hopper_variant(quantized: bool, chunks: int, rows_per_expert: float) -> int | None:
    """Index of the compiled kernel for so many rows an expert on average, or None."""
    best = None
    for i, (fp4, size, rows) in enumerate(HOPPER_VARIANTS):
        if (fp4, size) == (quantized, chunks) and rows_per_expert >= rows:
            best = i
    return best
