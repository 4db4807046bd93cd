"""The model: a functional Flax MoE transformer with explicit numerics."""

from trace_jax.model import paged
from trace_jax.model.config import ModelConfig
from trace_jax.model.moe import NOT_RECORDED
from trace_jax.model.specs import (
    Guidance,
    Numerics,
    Record,
    numerics,
    planned_layers,
)
from trace_jax.model.transformer import (
    Output,
    apply,
    empty_cache,
    init,
    logits,
    unembedding,
)
