"""The plain forward of a checkpoint: tokens to logits, in BF16 or under an FP4 policy."""

from functools import partial
from typing import NamedTuple

import jax

from trace_jax.fp4 import BF16_POLICY, PrecisionPolicy
from trace_jax.model.config import ModelConfig
from trace_jax.model.specs import numerics
from trace_jax.model.transformer import apply, logits


class Forward(NamedTuple):
    """logits FP32 [B, S, vocab]; routes int32 [layers, B, S, slots]."""

    logits: jax.Array
    routes: jax.Array


@partial(jax.jit, static_argnames=("config", "policy"))
def forward(
    config: ModelConfig,
    params: dict,
    tokens: jax.Array,
    policy: PrecisionPolicy = BF16_POLICY,
) -> Forward:
    """Logits of every position of tokens int32 [B, S], without a cache.

    `policy` says which tensors are quantized; QTensors in `params` are used as they are.
    """
    out = apply(config, params, tokens, numerics(config, policy.resolve(config.num_layers)))
    return Forward(logits(params, out.hidden), out.record.routes)
