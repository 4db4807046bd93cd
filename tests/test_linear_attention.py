"""The gated delta rule: chunks against a loop in float64, padding, states, gradients."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.model import linear_attention
from trace_jax.model.linear_attention import causal_convolution, delta_rule


def loop(q, k, v, log_decay, rate, state):
    """The recurrence as the module's docstring writes it, in float64."""
    out = []
    for t in range(q.shape[1]):
        state = state * np.exp(log_decay[:, t])[..., None, None]
        held = np.einsum("bhk,bhkv->bhv", k[:, t], state)
        update = rate[:, t][..., None] * (v[:, t] - held)
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], update)
        out.append(np.einsum("bhk,bhkv->bhv", q[:, t], state))
    return np.stack(out, axis=1), state


@cache
def inputs(length, seed=0):
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(2, length, 3, 4))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    q, v = rng.normal(size=k.shape), rng.normal(size=(2, length, 3, 5))
    log_decay = -rng.exponential(0.3, size=(2, length, 3))
    log_decay[:, length // 2] = -40.0  # forgets nearly all at once
    rate = rng.uniform(size=(2, length, 3))
    return q, k, v, log_decay, rate, rng.normal(size=(2, 3, 4, 5))


fp32 = lambda arrays: tuple(jnp.asarray(a, jnp.float32) for a in arrays)
run = jax.jit(delta_rule)


@pytest.mark.parametrize("length", [1, 2, 64, 150])
def test_chunks_equal_the_loop(length):
    """One token, less than a chunk, a whole one, and two and a bit."""
    given = inputs(length)
    out, state = run(*fp32(given))
    wanted, last = loop(*given)
    np.testing.assert_allclose(out, wanted, atol=3e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(state, last, atol=3e-5 * np.abs(last).max())


def test_the_state_carries_a_sequence_over_a_cut():
    given = fp32(inputs(150))
    whole, last = run(*given)
    cut = lambda part: tuple(a[:, part] for a in given[:5])
    first, state = run(*cut(slice(0, 70)), given[5])
    rest, state = run(*cut(slice(70, 150)), state)
    np.testing.assert_allclose(jnp.concatenate([first, rest], axis=1), whole, atol=1e-4)
    np.testing.assert_allclose(state, last, atol=1e-4)


def test_gradients_of_chunks_are_those_of_single_tokens():
    *given, state = fp32(inputs(70))

    def by_token(*arrays):
        step = lambda s, x: linear_attention._one(s, *x)
        ours = tuple(jnp.moveaxis(a, 1, 0) for a in arrays)
        return jnp.moveaxis(jax.lax.scan(step, state, ours)[1], 0, 1)

    weight = jnp.asarray(np.random.default_rng(1).normal(size=(2, 70, 3, 5)), jnp.float32)
    total = lambda f: jax.jit(
        jax.grad(lambda *a: jnp.sum(weight * f(*a)), argnums=(0, 1, 2, 3, 4))
    )
    got = total(lambda *a: delta_rule(*a, state)[0])(*given)
    for mine, wanted in zip(got, total(by_token)(*given), strict=True):
        assert np.isfinite(mine).all()
        np.testing.assert_allclose(mine, wanted, atol=1e-4 * float(jnp.abs(wanted).max()))


def test_convolution_is_causal_and_leaves_its_last_valid_inputs():
    rng = np.random.default_rng(2)
    x, weight = rng.normal(size=(2, 6, 3)), rng.normal(size=(3, 4))
    before = rng.normal(size=(2, 3, 3))
    valid = np.arange(6)[None] < np.array([[6], [2]])
    out, state = causal_convolution(*fp32((x, weight, before)), jnp.asarray(valid))
    inputs_ = np.concatenate([before, x], axis=1)
    wanted = np.stack(
        [sum(inputs_[:, t + i] * weight[:, i] for i in range(4)) for t in range(6)], axis=1
    )
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state[0], x[0, 3:], rtol=1e-6)
    np.testing.assert_allclose(state[1], inputs_[1, 2:5], rtol=1e-6)
