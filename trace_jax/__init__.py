"""trace_jax: reinforcement learning of MoE language models with FP4 rollouts.

TRACE (arXiv 2610.07767) lets the rollout's quantization outcomes guide the
trainer's FP4 rounding.
"""
