"""Parameters and bytes of a model by shapes alone."""

import jax

from trace_jax.fp4 import (
    FP8,
    MXFP4,
    NVFP4,
    E4M3Rows,
    Format,
    GuidancePlan,
    guidance_bytes_per_token,
)
from trace_jax.fp4.formats import num_blocks
from trace_jax.model.config import ModelConfig
from trace_jax.model.linear_attention import empty_state
from trace_jax.model.specs import stacks_of
from trace_jax.model.tensors import param_shapes, parameter_count


def weight_bytes(config: ModelConfig, fmt: Format | None) -> int:
    """Bytes of rollout weights: BF16, with the expert weights in `fmt` if one is given."""
    total = 2 * parameter_count(config)
    if fmt is None:
        return total
    for stack in stacks_of(param_shapes(config)["layers"]):
        for weight in (stack["moe"][name] for name in ("gate_up", "down") if "moe" in stack):
            *rows, columns = weight.shape
            row = num_blocks(columns, fmt) * (fmt.block // 2 + 1)
            outers = 4 * rows[0] * rows[1] if fmt.outer != "none" else 0
            total += weight.size // columns * row + outers - 2 * weight.size
    return total


def kv_bytes_per_token(
    config: ModelConfig, fmt: Format | E4M3Rows | None, kv_window: int = 0
) -> int:
    """Bytes that a token leaves in the caches of all layers: K and V, or latents.

    With a window of BF16 tokens every row is kept in BF16 beside `fmt`, see
    kv_planes.empty_planes.
    """
    total = 0
    for layers, rows, width in (config.site_shapes()[site] for site in ("k", "v")):
        total += len(layers) * rows * _row_bytes(width, fmt)
        if kv_window and fmt is not None:
            total += len(layers) * rows * _row_bytes(width, None)
    return total


def _row_bytes(width: int, fmt: Format | E4M3Rows | None) -> int:
    if fmt is None:
        return 2 * width
    # One more byte a row: the exponent of its power of two.
    return 1 + (width if fmt == FP8 else num_blocks(width, fmt) * (fmt.block // 2 + 1))


def state_bytes(config: ModelConfig) -> int:
    """Bytes of a sequence's linear-attention states, however long it is."""
    linear = config.num_layers - len(config.attention_layers)
    state = jax.eval_shape(lambda: empty_state(config, (linear,)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def summary(config: ModelConfig, plan: GuidancePlan) -> dict[str, int]:
    """What `experiments.inspect` prints."""
    return {
        "parameters": parameter_count(config),
        "active": parameter_count(config, active=True),
        "bytes_bf16": weight_bytes(config, None),
        "bytes_nvfp4": weight_bytes(config, NVFP4),
        "bytes_mxfp4": weight_bytes(config, MXFP4),
        "kv_bytes_per_token_bf16": kv_bytes_per_token(config, None),
        "kv_bytes_per_token_fp8": kv_bytes_per_token(config, FP8),
        "kv_bytes_per_token_nvfp4": kv_bytes_per_token(config, NVFP4),
        "state_bytes": state_bytes(config),
        "guidance_bytes_per_token": round(guidance_bytes_per_token(config, plan, NVFP4)),
    }
