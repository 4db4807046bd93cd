"""Products of routed tokens with their experts' weights.

    routing = route(expert_ids, num_experts)
    mid = expert_matmul(x, gate_up, routing, activation="silu")     # BF16 [rows, F]
    out = expert_matmul(mid, down, routing)                         # FP32 [slots, N]
    y = (out.reshape(tokens, top_k, N) * gate_weights[..., None]).sum(1)

A slot is (token, choice), numbered token * top_k + choice; a row is a slot in the order of
its expert. Nothing is padded and nothing is dropped; shapes depend on tokens and top_k alone.

Contract of `expert_matmul`, for every version:
  out[row] = f(sum_k value[expert(row), n, k] * x[source(row), k] * x_outer[source(row)])
  with value = E2M1 code x block scale x outer scale (FP4 weights) or the BF16 weight.
  The sum runs over exact products (code x block scale is exact in BF16) in FP32; outer scales
  multiply the FP32 sum. W4A4 is the same call with x holding quantized values: they are exact
  in BF16, with or without their power-of-two outer scale, which may be given as `x_outer`.
  Biases of the weights, if any, are added in FP32 after that.
  Gated weights: f is the gated activation, in FP32, rounded once to BF16; source(row) is the
  row's token; the result is in row order. Plain weights: f is the identity; source(row) is
  the row; the result is FP32 in slot order.

Gradients reach x and x_outer, through the dequantized weights; weights are constants.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.kernels import cuda_build, dispatch, expert_matmul_tpu, prefill, triton_call
from trace_jax.kernels.expert_layout import ExpertWeights as ExpertWeights
from trace_jax.kernels.expert_layout import decode_bias, decode_layout
from trace_jax.kernels.expert_layout import lay_out as lay_out

Activation = Literal["silu", "clamped_swiglu"]
EPILOGUE = {None: 0, "silu": 1, "clamped_swiglu": 2}
_MAX_EXPERTS = 511  # of the CUDA kernel


class Routing(NamedTuple):
    """Slots ordered by expert.

    Attributes:
      slot: int32 [tokens * top_k], the slot of each row.
      offset: int32 [experts + 1], the first row of each expert; the last is the row count.
    """

    slot: jax.Array
    offset: jax.Array


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
    parts = 2 if weights.gated else 1
    out = out * jnp.repeat(weights.outer[expert, :parts], weights.outputs, axis=1)
    bias = decode_bias(weights)
    if bias is not None:
        out = out + bias[expert]
    if not weights.gated:
        return jnp.zeros_like(out).at[routing.slot].set(out)
    return gated_activation(*jnp.split(out, 2, axis=-1), activation).astype(jnp.bfloat16)


def _hopper(x, weights, routing, x_outer, activation, variant=None):
    rows, (experts, _, chunks, _) = routing.slot.shape[0], weights.data.shape
    dtype = jnp.bfloat16 if weights.gated else jnp.float32
    groups = rows // 8 + experts  # of 8 rows: the gathered rows, and where their results go
    out = (
        jax.ShapeDtypeStruct((rows, weights.outputs), dtype),
        jax.ShapeDtypeStruct((groups, chunks, 1024), jnp.uint8),
        jax.ShapeDtypeStruct((groups, 8, 2), jnp.int32),
    )
    if variant is None:
        variant = hopper_variant(weights.quantized, rows / experts, chunks)
    none = jnp.zeros(0, jnp.float32)
    call = jax.ffi.ffi_call(cuda_build.register("expert_matmul"), out)
    return call(
        weights.data, weights.outer, none if weights.bias is None else weights.bias.reshape(-1), x,
        none if x_outer is None else x_outer.reshape(-1), routing.slot, routing.offset,
        variant=np.int64(variant), epilogue=np.int64(EPILOGUE[activation]),
        top_k=np.int64(rows // x.shape[0]),
    )[0]  # fmt: skip


def _prefill(x, weights, routing, x_outer, activation):
    return prefill.expert_matmul(x, weights, routing, x_outer, EPILOGUE[activation])


def _tpu(x, weights, routing, x_outer, activation, interpret=False, float4=None):
    rows = routing.slot.shape[0]
    if weights.gated:
        source = routing.slot // (rows // x.shape[0])
        x, x_outer = x[source], None if x_outer is None else x_outer[source]
    activate = None if activation is None else partial(gated_activation, activation=activation)
    out = expert_matmul_tpu.expert_matmul(
        x, weights.data, weights.scales, weights.outer, routing.offset, x_outer, activate,
        interpret, float4,
    )  # fmt: skip
    return out if weights.gated else jnp.zeros_like(out).at[routing.slot].set(out)


def _triton(x, weights, routing, x_outer, activation):
    from trace_jax.kernels import expert_matmul_triton

    return expert_matmul_triton.expert_matmul(x, weights, routing, x_outer, activation)


VERSIONS = {
    "reference": _reference,
    "hopper": _hopper,
    "prefill": _prefill,
    "triton": _triton,
    "pallas_tpu": _tpu,
    "pallas_interpret": partial(_tpu, interpret=True),
}


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _product(x, weights, routing, x_outer, activation, version):
    return VERSIONS[version](x, weights, routing, x_outer, activation)


def _forward(x, weights, routing, x_outer, activation, version):
    out = _product(x, weights, routing, x_outer, activation, version)
    return out, (x, weights, routing, x_outer)


def _backward(activation, version, residual, g):
    x, weights, routing, x_outer = residual
    product = lambda x, x_outer: _reference(x, weights, routing, x_outer, activation)
    dx, dx_outer = jax.vjp(product, x, x_outer)[1](g)
    return dx, *jax.tree.map(_no_gradient, (weights, routing)), dx_outer


def _no_gradient(a: jax.Array):
    if jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.zeros_like(a)
    return np.zeros(a.shape, jax.dtypes.float0)


_product.defvjp(_forward, _backward)


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


def hopper_refusal(x, weights) -> str | None:
    """Why the CUDA kernel cannot multiply x with weights; None if it can."""
    if weights.layout != "hopper":
        return f"it takes weights in the layout 'hopper', not {weights.layout!r}"
    if x.dtype != jnp.bfloat16:
        return f"it takes BF16 activations, not {x.dtype}"
    if weights.data.shape[0] > _MAX_EXPERTS:
        return f"it takes up to {_MAX_EXPERTS} experts, not {weights.data.shape[0]}"
    return cuda_build.hopper_refusal()


def _triton_refusal(x, weights) -> str | None:
    if weights.layout != "triton":
        return f"it takes weights in the layout 'triton', not {weights.layout!r}"
    if x.dtype != jnp.bfloat16:
        return f"it takes BF16 activations, not {x.dtype}"
    return triton_call.refusal()


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
      version: "auto", "reference", "hopper", "prefill" (Hopper, for many rows an expert),
        "triton", "pallas_tpu", or "pallas_interpret" (the TPU kernel, interpreted: slow, anywhere).

    Returns:
      Gated: BF16 [rows, F] in row order. Plain: FP32 [tokens * top_k, N] in slot order.

    Raises:
      ValueError: shapes or activation that do not fit the weights, or a version that
        cannot run this call.
    """
    rows = routing.slot.shape[0]
    if x.shape[-1] != weights.k:
        raise ValueError(f"expert_matmul: x has K = {x.shape[-1]}, the weights {weights.k}")
    if (activation is not None) != weights.gated or activation not in EPILOGUE:
        raise ValueError(
            f"expert_matmul: activation {activation!r} with {'gated' if weights.gated else 'plain'}"
            " weights; write silu or clamped_swiglu for gated weights, None for plain ones"
        )
    if rows % x.shape[0] or (not weights.gated and x.shape[0] != rows):
        raise ValueError(f"expert_matmul: {x.shape[0]} rows of x do not fit {rows} routed rows")
    refusals = {
        "reference": lambda: None,
        "hopper": lambda: hopper_refusal(x, weights),
        "prefill": lambda: hopper_refusal(x, weights),
        "triton": lambda: _triton_refusal(x, weights),
        "pallas_tpu": lambda: _tpu_refusal(x, weights),
        "pallas_interpret": lambda: _pallas_refusal(x, weights),
    }
    many = prefill.pays(rows, weights.data.shape[0])
    best = {"gpu": ("prefill" if many else "hopper", "triton"), "tpu": ("pallas_tpu",)}
    name = dispatch.choose("expert_matmul", version, refusals, best)
    return _product(x, weights, routing, x_outer, activation, name)


def matmul(
    x: jax.Array,
    weights: ExpertWeights,
    *,
    x_outer: jax.Array | None = None,
    activation: Activation | None = None,
    version: str = "auto",
) -> jax.Array:
    """A dense product by the same kernels: `expert_matmul` with one expert, x BF16 [tokens, K].

    Returns BF16 [tokens, F] for gated weights, FP32 [tokens, N] for plain ones.
    """
    slot = jnp.arange(x.shape[0], dtype=jnp.int32)
    routing = Routing(slot, jnp.array([0, x.shape[0]], jnp.int32))
    return expert_matmul(
        x, weights, routing, x_outer=x_outer, activation=activation, version=version
    )


# The kernels that cuda/expert_matmul.cu compiles, in its order:
# (FP4?, smallest rows an expert on average for which it is chosen, few rows?).
HOPPER_VARIANTS = (
    (True, 0.0, False), (False, 0.0, False), (False, 48.0, False),
    (True, 0.0, True), (True, 0.5, True),
)  # fmt: skip
_FEW_ROWS = 4.0  # an expert on average; from here on the others are as fast
_FEW_CHUNKS = (12, 32)  # of 64 along K, for which the kernels for few rows are compiled


def hopper_variant(quantized: bool, rows_per_expert: float, chunks: int) -> int:
    """Index of the compiled kernel for so many rows an expert on average and chunks of 64 of K."""
    few = quantized and rows_per_expert < _FEW_ROWS and chunks in _FEW_CHUNKS
    return max(
        i
        for i, (fp4, rows, for_few) in enumerate(HOPPER_VARIANTS)
        if (fp4, for_few) == (quantized, few) and rows_per_expert >= rows
    )
