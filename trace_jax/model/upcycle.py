"""A mixture of experts from a dense model (sparse upcycling, arXiv 2212.05055)."""

import dataclasses

import jax
import jax.numpy as jnp

from trace_jax.model.config import ModelConfig


def upcycle(
    config: ModelConfig,
    params: dict,
    experts: int,
    top_k: int,
    key: jax.Array,
    noise: float = 0.0,
) -> tuple[ModelConfig, dict]:
    """Copies the MLP into every expert and draws a fresh router.

    The gates of the chosen experts sum to one, so without noise the function is the dense
    model's up to rounding, whatever the router says.

    Args:
      config, params: a dense model.
      noise: relative size of the Gaussian noise on the experts' weights; breaks the
        symmetry of experts that are otherwise moved apart by their tokens alone.

    Raises:
      ValueError: the model has experts already, or the counts do not fit.
    """
    if config.num_experts:
        raise ValueError(f"the model has {config.num_experts} experts already; give a dense one")
    new = dataclasses.replace(config, num_experts=experts, top_k=top_k, norm_topk=True)
    router_key, *leaf_keys = jax.random.split(key, 3)
    moe = dict(params["layers"]["moe"])
    for leaf_key, name in zip(leaf_keys, ("gate_up", "down"), strict=True):
        copies = jnp.repeat(moe[name], experts, axis=1)
        if noise:
            drawn = jax.random.normal(leaf_key, copies.shape, jnp.float32)
            copies = (copies.astype(jnp.float32) * (1 + noise * drawn)).astype(copies.dtype)
        moe[name] = copies
    shape = (config.num_layers, experts, config.hidden)
    moe["router"] = 0.02 * jax.random.normal(router_key, shape, jnp.float32)
    return new, {**params, "layers": {**params["layers"], "moe": moe}}
