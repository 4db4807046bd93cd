"""The actor: prefill, decode over an FP4 KV-cache, sampling, the record that crosses."""

from trace_jax.rollout.data_parallel import make_engine
from trace_jax.rollout.engine import Engine, EngineConfig
from trace_jax.rollout.record import Rollout
