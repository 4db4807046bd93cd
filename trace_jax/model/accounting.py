"""Parameters and bytes of a model by shapes alone."""

from trace_jax.fp4 import MXFP4, NVFP4, Format, GuidancePlan, guidance_bytes_per_token
from trace_jax.fp4.formats import num_blocks
from trace_jax.model.config import ModelConfig
from trace_jax.model.tensors import param_shapes, parameter_count


def weight_bytes(config: ModelConfig, fmt: Format | None) -> int:
    """Bytes of rollout weights: BF16, with the expert weights in `fmt` if one is given."""
    total = 2 * parameter_count(config)
    if fmt is None:
        return total
    moe = param_shapes(config)["layers"]["moe"]
    for name in ("gate_up", "down"):
        *rows, columns = moe[name].shape
        count = moe[name].size // columns
        row = num_blocks(columns, fmt) * (fmt.block // 2 + 1)
        outers = 4 * rows[0] * rows[1] if fmt.outer != "none" else 0
        total += count * row + outers - 2 * moe[name].size
    return total


def kv_bytes_per_token(config: ModelConfig, fmt: Format | None) -> int:
    """Bytes of keys and values that a token leaves in all layers with a KV-cache."""
    row = 2 * config.head_dim
    if fmt is not None:
        row = num_blocks(config.head_dim, fmt) * (fmt.block // 2 + 1) + 1
    return 2 * len(config.attention_layers) * config.num_kv_heads * row


def summary(config: ModelConfig, plan: GuidancePlan) -> dict[str, int]:
    """What `experiments.inspect` prints."""
    return {
        "parameters": parameter_count(config),
        "active": parameter_count(config, active=True),
        "bytes_bf16": weight_bytes(config, None),
        "bytes_nvfp4": weight_bytes(config, NVFP4),
        "bytes_mxfp4": weight_bytes(config, MXFP4),
        "kv_bytes_per_token_bf16": kv_bytes_per_token(config, None),
        "kv_bytes_per_token_nvfp4": kv_bytes_per_token(config, NVFP4),
        "guidance_bytes_per_token": round(guidance_bytes_per_token(config, plan, NVFP4)),
    }
