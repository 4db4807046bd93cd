"""trace_jax: reinforcement learning of MoE language models with FP4 rollouts.

TRACE (arXiv 2610.07767) lets the rollout's quantization outcomes guide the
trainer's FP4 rounding.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trace_jax.model.checkpoint_export import save_checkpoint
    from trace_jax.model.checkpoint_io import load_checkpoint
    from trace_jax.model.forward import forward

# Loaded at first use: `import trace_jax` must not need JAX.
_LAZY = {
    "load_checkpoint": "trace_jax.model.checkpoint_io",
    "save_checkpoint": "trace_jax.model.checkpoint_export",
    "forward": "trace_jax.model.forward",
}


def __getattr__(name: str):
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
