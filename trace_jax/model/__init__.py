"""The model: a functional Flax MoE transformer with explicit numerics."""

from trace_jax.model import paged
from trace_jax.model.config import ModelConfig
from trace_jax.model.moe import NOT_RECORDED
from trace_jax.model.transformer import (
    Guidance,
    Numerics,
    Output,
    Record,
    apply,
    empty_cache,
    init,
    logits,
    numerics,
    planned_layers,
    unembedding,
)
