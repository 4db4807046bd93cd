"""Random rollout parameters of a configuration, for benchmarks of decode."""

import dataclasses
from functools import partial

import jax

from trace_jax import model, sync
from trace_jax.fp4 import BF16_POLICY, GuidancePlan, PrecisionPolicy, Rule

COMPACT = GuidancePlan(layers="all", sites=("expert_in", "k", "v"))
NVFP4 = PrecisionPolicy((Rule("*", "nvfp4"),))


def random_params(config, format_: str) -> dict:
    """Rollout parameters in the kernels' layout, made layer by layer on the device."""
    precision = precision_of(format_, 1)

    @partial(jax.jit, static_argnums=0)
    def draw(kind, key):
        drawn = model.init(one_layer(config, kind), key)
        return sync.by_layer(sync.to_rollout(drawn, precision), kernels=True)

    keys = jax.random.split(jax.random.key(0), config.num_layers)
    first, *rest = zip(config.layer_kinds, keys, strict=True)
    params = draw(*first)
    layers = [params["layers"][0]] + [draw(*layer)["layers"][0] for layer in rest]
    return {**params, "layers": tuple(layers)}


def one_layer(config, kind):
    """The model with one layer alone, of a kind."""
    every = 2 if kind.linear else 1
    windows = config.windows[:1]
    return dataclasses.replace(config, num_layers=1, windows=windows, full_attention_every=every)


def precision_of(format_: str, layers: int):
    return (BF16_POLICY if format_ == "bf16" else NVFP4).resolve(layers)
