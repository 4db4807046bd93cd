"""Every family against transformers: logits, routes, cached decode, greedy tokens.

Golden values: `python tests/golden/make_golden.py` (pinned torch and transformers). A
difference means that a family's arithmetic changed, not that values need refreshing.
"""

from functools import cache, partial

import golden_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trace_jax
from trace_jax import model
from trace_jax.fp4 import BF16_POLICY

family = pytest.mark.parametrize("family", golden_files.ALL)


@cache
def stepper(config):
    """One decode step of a batch of two: tokens [2], position, cache -> logits, routes, cache."""
    spec = model.numerics(config, BF16_POLICY.resolve(config.num_layers))

    @partial(jax.jit, donate_argnums=3)
    def step(params, tokens, at, cache):
        positions = jnp.full((2, 1), at)
        out = model.apply(config, params, tokens[:, None], spec, positions=positions, cache=cache)
        return model.logits(params, out.hidden[:, 0]), out.record.routes[:, :, 0], out.cache

    return step


def start(config, length):
    return model.empty_cache(config, BF16_POLICY.resolve(config.num_layers), 2, length)


def error(got, family) -> np.ndarray:
    """Absolute error in standard deviations of the golden logits."""
    wanted = golden_files.expected(family)["logits"]
    return np.abs(np.asarray(got) - wanted) / wanted.std()


def with_experts(routes, config) -> np.ndarray:
    """Sorted routes of the layers with experts; the dense ones have none."""
    routes = np.asarray(routes)
    assert (routes[: config.dense_layers] == model.NOT_RECORDED).all()
    return np.sort(routes[config.dense_layers :], axis=-1)


@family
def test_full_sequence_logits_and_routes(family):
    config, params = golden_files.checkpoint(family)
    golden = golden_files.expected(family)
    out = trace_jax.forward(config, params, golden["tokens"])
    assert out.logits.dtype == jnp.float32
    assert error(out.logits, family).max() < 1e-4
    if "routes" in golden:
        np.testing.assert_array_equal(with_experts(out.routes, config), golden["routes"])


@family
def test_decode_through_the_cache(family):
    config, params = golden_files.checkpoint(family)
    golden = golden_files.expected(family)
    tokens = golden["tokens"]
    kv, logits, routes = start(config, 40), [], []
    for at in range(tokens.shape[1]):
        step_logits, step_routes, kv = stepper(config)(params, tokens[:, at], at, kv)
        logits.append(step_logits)
        routes.append(step_routes)
    assert error(np.stack(logits, axis=1), family).max() < 1e-4
    if "routes" in golden:
        got = with_experts(np.stack(routes, axis=2), config)
        np.testing.assert_array_equal(got, golden["routes"])


@family
def test_greedy_tokens(family):
    config, params = golden_files.checkpoint(family)
    golden = golden_files.expected(family)
    given, kv = golden["tokens"][0, :8].tolist(), start(config, 40)
    for at in range(len(given) + 15):
        token = jnp.full(2, given[at], jnp.int32)
        logits, _, kv = stepper(config)(params, token, at, kv)
        if at >= 7:
            given.append(int(jnp.argmax(logits[0])))
    assert given[8:] == golden["greedy"].tolist()


@family
def test_bf16_error_is_that_of_transformers(family):
    """Of the median token: a route that flips at a near tie is not an error of rounding.

    Not rounding at all would be wrong too: rollouts and training round alike.
    """
    config, params = golden_files.checkpoint(family, "bfloat16")
    golden = golden_files.expected(family)
    logits = trace_jax.forward(config, params, golden["tokens"]).logits
    ours = np.median(np.sqrt(np.mean(error(logits, family) ** 2, axis=-1)))
    assert 1e-3 < ours < max(1.25 * golden["bf16_error"][0], 3e-3)


@family
def test_bf16_error_of_every_token_once_routes_are_the_same(family):
    """Nothing hides behind the median: on FP32's routes the error of all tokens is as small."""
    config, params = golden_files.checkpoint(family, "bfloat16")
    golden = golden_files.expected(family)
    routes = None
    if "routes" in golden:
        shape = (config.num_layers, *golden["tokens"].shape, config.top_k)
        routes = np.full(shape, model.NOT_RECORDED, np.int32)
        routes[config.dense_layers :] = golden["routes"]
    spec = model.numerics(config, BF16_POLICY.resolve(config.num_layers))

    @jax.jit
    def forward(params, tokens, routes):
        return model.logits(params, model.apply(config, params, tokens, spec, routes=routes).hidden)

    logits = forward(params, golden["tokens"], routes)
    assert np.sqrt(np.mean(error(logits, family) ** 2)) < 1.5 * golden["bf16_error"][0]
