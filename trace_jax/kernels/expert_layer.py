"""A layer of experts: gate and up, activation, quantization, down, as one op of a decode step.

Contract, for every version:
  mid = expert_matmul(x, gate_up, routing, activation=activation)
  mid, left = fake_quantize_rows(mid, fmt, record=record)      # if there is a format
  out = expert_matmul(mid, down, routing)
"reference" is these calls, each in its best version; "hopper" gives the bits of those in version
"hopper" in four launches that overlap. For what has no gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.fp4.formats import Format
from trace_jax.fp4.guidance import SiteGuidance
from trace_jax.kernels import cuda_build, dispatch, expert_matmul, fake_quantize, prefill
from trace_jax.kernels.expert_matmul import Activation, ExpertWeights, Routing


def _reference(x, gate_up, down, routing, activation, fmt, record):
    mid = expert_matmul.expert_matmul(x, gate_up, routing, activation=activation)
    left = None
    if fmt is not None:
        mid, left = fake_quantize.fake_quantize_rows(mid, fmt, record=record)
    return expert_matmul.expert_matmul(mid.astype(x.dtype), down, routing), left


def _hopper(x, gate_up, down, routing, activation, fmt, record):
    rows, experts = routing.slot.shape[0], gate_up.data.shape[0]
    width, groups = gate_up.outputs, rows // 8 + experts
    scratch = lambda w: (
        jax.ShapeDtypeStruct((groups, w.data.shape[2], 1024), jnp.uint8),
        jax.ShapeDtypeStruct((groups, 8, 2), jnp.int32),
    )
    out = (
        jax.ShapeDtypeStruct((rows, down.outputs), jnp.float32),
        jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        *scratch(gate_up),
        *scratch(down),
        jax.ShapeDtypeStruct((rows, (record or 0) * width // 8), jnp.uint8),
        jax.ShapeDtypeStruct((rows, 0 if record is None else width // 16), jnp.uint8),
    )
    variant = lambda w: np.int64(
        expert_matmul.hopper_variant(w.quantized, rows / experts, w.data.shape[2])
    )
    none = jnp.zeros(0, jnp.float32)
    of = lambda w: (w.data, w.outer, none if w.bias is None else w.bias.reshape(-1))
    call = jax.ffi.ffi_call(cuda_build.register("expert_layer", "expert_matmul"), out)
    y, *_, bits, scales = call(
        *of(gate_up), *of(down), x, routing.slot, routing.offset,
        variant=variant(gate_up), down_variant=variant(down),
        epilogue=np.int64(expert_matmul.EPILOGUE[activation]),
        top_k=np.int64(rows // x.shape[0]), quantize=fmt is not None,
    )  # fmt: skip
    return y, None if record is None else SiteGuidance(bits if record else None, scales)


VERSIONS = {"reference": _reference, "hopper": _hopper}


def _hopper_refusal(x, gate_up, down, fmt) -> str | None:
    if fmt is not None:
        mid = jax.ShapeDtypeStruct((gate_up.outputs,), jnp.bfloat16)
        if reason := fake_quantize.hopper_refusal(mid, fmt):
            return reason
    if gate_up.outputs > 3072:
        return f"it takes experts up to 3,072 wide, not {gate_up.outputs}"
    if gate_up.quantized != down.quantized:
        return "it takes two weights of one format"
    return expert_matmul.hopper_refusal(x, gate_up) or expert_matmul.hopper_refusal(x, down)


def expert_layer(
    x: jax.Array,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    routing: Routing,
    *,
    activation: Activation,
    fmt: Format | None = None,
    record: int | None = None,
    version: str = "auto",
) -> tuple[jax.Array, SiteGuidance | None]:
    """The outputs of the experts that tokens are routed to; see the module's contract.

    Args:
      x: BF16 [tokens, K], quantized already where it is to be.
      gate_up, down: from `lay_out`; gate and up together, and plain.
      routing: from `route`.
      fmt: format of the values between the products; None: BF16.
      record: see `fake_quantize_rows`; None without a format.
      version: "auto", "reference" or "hopper".

    Returns:
      FP32 [tokens * top_k, N] in slot order and, with `record`, guidance in row order.

    Raises:
      ValueError: a version that cannot run this call.
    """
    refusals = {
        "reference": lambda: None,
        "hopper": lambda: _hopper_refusal(x, gate_up, down, fmt),
    }
    many = prefill.pays(routing.slot.shape[0], gate_up.data.shape[0])
    best = {} if many else {"gpu": ("hopper",)}  # many rows: the three calls, in version "prefill"
    name = dispatch.choose("expert_layer", version, refusals, best)
    return VERSIONS[name](x, gate_up, down, routing, activation, fmt, record)
