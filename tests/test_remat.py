"""What the backward pass keeps of a layer moves memory, and no bit of the gradient."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import params_of

from trace_jax import model
from trace_jax.fp4 import PrecisionPolicy, Rule
from trace_jax.model import ModelConfig
from trace_jax.model.remat import POINTS, points_of

CONFIG = ModelConfig(
    vocab_size=41,
    num_layers=6,
    hidden=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    expert_dim=32,
    num_experts=4,
    top_k=2,
)
QUICK = {"xla_backend_optimization_level": 0}  # halves the compile time, changes no meaning


class Compiled(NamedTuple):
    gradient: np.ndarray
    temporary: int  # bytes


@cache
def gradient(remat: str) -> Compiled:
    """Of a loss of the whole forward with the experts' second input in NVFP4."""
    policy = PrecisionPolicy((Rule("expert_mid", "nvfp4"),))
    numerics = model.numerics(CONFIG, policy.resolve(CONFIG.num_layers))
    tokens = jax.random.randint(jax.random.key(0), (2, 64), 0, 41)

    def loss(params):
        out = model.apply(CONFIG, params, tokens, numerics, remat=points_of(remat))
        hidden = out.hidden.astype(jnp.float32)
        return jnp.sum(hidden**2 * jnp.arange(32)[None, None]) + out.balance

    params = params_of(CONFIG)
    compiled = jax.jit(jax.grad(loss), compiler_options=QUICK).lower(params).compile()
    leaves = [np.asarray(a).ravel() for a in jax.tree.leaves(compiled(params))]
    return Compiled(np.concatenate(leaves), compiled.memory_analysis().temp_size_in_bytes)


@pytest.mark.parametrize("remat", ["full", "gate_up", ",".join(POINTS)])
def test_the_gradient_is_the_same_bits(remat):
    assert np.abs(gradient("none").gradient).max() > 0
    np.testing.assert_array_equal(gradient(remat).gradient, gradient("none").gradient)


def test_what_is_kept_is_what_memory_it_takes():
    """A layer's input alone, one value more, all the points, everything."""
    full, gate_up, points, none = (
        gradient(remat).temporary for remat in ("full", "gate_up", ",".join(POINTS), "none")
    )
    assert full < gate_up < points < none / 2
    rows = 128 * 2  # routed tokens; tiles round them up
    assert gate_up - full >= CONFIG.num_layers * rows * 2 * 32 * 4, "FP32, of every layer"


def test_every_point_is_a_value_of_the_forward():
    """A name that no layer gives would keep nothing, in silence."""
    numerics = model.numerics(CONFIG, PrecisionPolicy(()).resolve(CONFIG.num_layers))
    tokens = jnp.zeros((1, 4), jnp.int32)
    shapes = jax.eval_shape(partial(model.init, CONFIG), jax.random.key(0))
    jaxpr = jax.make_jaxpr(lambda p: model.apply(CONFIG, p, tokens, numerics).hidden)(shapes)
    assert all(f"name={point}]" in str(jaxpr) for point in POINTS)


def test_names_are_read_and_a_wrong_one_is_refused():
    assert points_of("none") is None and points_of("full") == ()
    assert points_of("router,gate_up") == ("router", "gate_up")
    with pytest.raises(ValueError, match="'routr' is nothing .* none, full or some of attention_o"):
        points_of("gate_up,routr")
