"""Losses over devices, clipping of summed gradients, and what masters in FP32 keep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import head_example, numpy_logprobs
from jax.sharding import Mesh, PartitionSpec

from trace_jax.rl import losses
from trace_jax.rl.logprobs import chunked_logprobs
from trace_jax.rl.losses import (
    ALGORITHMS,
    aggregation_weights,
    kl_to_reference,
    policy_loss,
)

T = 5


def head_loss(unembed, hidden, targets, old, advantages, mask, weights, *, name):
    chosen = losses.algorithm(name)
    logp, _ = chunked_logprobs(hidden, unembed, targets, temperature=0.8, chunk=16)
    kw = {key: chosen[key] for key in ("clip_low", "clip_high", "level", "dual_clip")}
    loss, _ = policy_loss(logp, old, advantages, mask, weights, **kw)
    return loss + 0.1 * kl_to_reference(logp, old, mask, weights)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_one_device_and_eight_give_the_same_loss_and_gradient(name):
    """BR-067: 8 rows, among them an empty one and lengths that differ; one row a device."""
    hidden, unembed, targets = head_example(8, T, 8, 11)
    rng = np.random.default_rng(2)
    old = numpy_logprobs(hidden, unembed, targets, 0.8)[0] + 0.1 * rng.normal(size=(8, T))
    mask = np.arange(T) < np.array([0, 1, 5, 2, 4, 5, 3, 1])[:, None]
    weights = aggregation_weights(mask, ALGORITHMS[name]["aggregation"], max_length=T)
    rows = (hidden, targets, *(x.astype(np.float32) for x in (old, rng.normal(size=8))), mask)
    value_and_grad = jax.value_and_grad(functools.partial(head_loss, name=name))
    expected = jax.jit(value_and_grad)(unembed, *rows, weights)

    mesh, split = Mesh(np.array(jax.devices()[:8]), ("data",)), PartitionSpec("data")
    whole = PartitionSpec()

    def on_each_device(unembed, *rows):  # the unembedding's gradient is summed by shard_map
        loss, grad = value_and_grad(unembed, *rows)
        return jax.lax.psum(loss, "data"), grad

    specs = dict(mesh=mesh, in_specs=(whole, *[split] * 6), out_specs=(whole, whole))
    loss, grad = jax.jit(jax.shard_map(on_each_device, **specs))(unembed, *rows, weights)
    assert float(loss) == pytest.approx(float(expected[0]), rel=2e-6, abs=1e-7)
    np.testing.assert_allclose(grad, expected[1], rtol=2e-5, atol=2e-7)


def test_clipping_acts_on_the_summed_gradient():
    """BR-074: (3, 0) and (0, 4) have mean (1.5, 2) of norm 2.5, clipped (.6, .8), not (.5, .5)."""
    slopes = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
    weights = aggregation_weights(np.ones((2, 1), bool), "token_mean", max_length=1)

    def loss(theta, slope, weights):
        logp = jnp.sum(slope * theta)[None, None]
        one = jnp.ones((1, 1))
        kw = dict(clip_low=0.2, clip_high=0.2, level="token")
        return policy_loss(logp, jax.lax.stop_gradient(logp), -one[0], one, weights, **kw)[0]

    gradient = jax.jit(jax.grad(loss))
    gradients = [gradient(jnp.zeros(2), slopes[i], weights[i:i + 1]) for i in range(2)]
    np.testing.assert_allclose(sum(gradients), [1.5, 2.0], rtol=1e-6)
    clip = optax.clip_by_global_norm(1.0)
    clipped, _ = clip.update(sum(gradients), clip.init(jnp.zeros(2)))
    np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=1e-6)


def test_an_fp32_master_keeps_updates_that_bf16_swallows():
    """BR-072: Adam of 1e-6 on 1.0 gives 0.999999; BF16 stays at 1."""
    hidden, targets = np.ones((1, 1, 1), jnp.bfloat16), np.zeros((1, 1), int)

    def loss(master):
        logp, _ = chunked_logprobs(
            hidden, master.astype(jnp.bfloat16), targets, temperature=1.0, chunk=1
        )
        return jnp.sum(logp)

    def after_one_step(params):
        adam = optax.adam(1e-6)
        updates, _ = adam.update(jax.jit(jax.grad(loss))(params), adam.init(params))
        return optax.apply_updates(params, updates)

    master = after_one_step(jnp.ones((2, 1)))
    np.testing.assert_allclose(master[:, 0], [0.999999, 1.000001], rtol=0, atol=6e-8)
    swallowed = after_one_step(jnp.ones((2, 1), jnp.bfloat16))
    np.testing.assert_array_equal(swallowed.astype(np.float32), 1.0)
