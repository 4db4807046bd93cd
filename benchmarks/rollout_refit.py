"""The time from BF16 parameters to FP4 in the kernels' layout, for benchmarks.rollout."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rollout_model import one_layer, precision_of
from trace_jax import model, sync


def refit(config) -> dict:
    """Seconds from BF16 parameters of every layer to the rollout's, on the device."""
    bf16 = lambda a: a.astype(jnp.bfloat16)

    @partial(jax.jit, static_argnums=0)
    def draw(kind, key):
        return jax.tree.map(bf16, model.init(one_layer(config, kind), key)["layers"])

    keys = jax.random.split(jax.random.key(0), config.num_layers)
    layers = [draw(kind, key) for kind, key in zip(config.layer_kinds, keys, strict=True)]
    precision = precision_of("nvfp4", 1)

    @jax.jit
    def renew(stacks):
        return sync.by_layer(sync.to_rollout({"layers": stacks}, precision), kernels=True)

    jax.block_until_ready([renew(stacks) for stacks in layers])
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([renew(stacks) for stacks in layers])
        times.append(time.perf_counter() - start)
    return {
        "precision": "nvfp4", "batch": None, "context": None, "regime": "refit, layer by layer",
        "seconds": round(float(np.median(times)), 4), "seconds_all": [round(t, 4) for t in times],
    }  # fmt: skip
