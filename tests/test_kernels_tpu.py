"""The Pallas TPU kernels: right when interpreted, and compiled ahead of time for each TPU."""

import importlib.util
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import decode, relative_error

from trace_jax.fp4 import NVFP4, quantize
from trace_jax.kernels import expert_matmul as em

EXPERTS, N, K, TOP_K = 4, 256, 256, 2
LOADS = {"even": (12, 12, 12, 12), "empty": (0, 1, 0, 47), "first_only": (48, 0, 0, 0)}
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")

quantize_expert = jax.jit(lambda w: quantize(w, NVFP4, outer_axes=(1, 2)))
lay_out = jax.jit(partial(em.lay_out, layout="tpu"))
product = jax.jit(
    partial(em.expert_matmul, version="pallas_interpret"), static_argnames="activation"
)


def weight(seed):
    size = jnp.exp2(jnp.arange(EXPERTS, dtype=jnp.float32) * 4 - 8)[:, None, None]
    w = jax.random.normal(jax.random.key(seed), (EXPERTS, N, K)) * size
    return quantize_expert(w.astype(jnp.bfloat16))


def routed(load):
    expert = np.repeat(np.arange(EXPERTS), load)
    ids = np.random.default_rng(0).permutation(expert).reshape(-1, TOP_K).astype(np.int32)
    slot = np.argsort(ids.reshape(-1), kind="stable")
    return em.route(jnp.asarray(ids), EXPERTS, version="reference"), slot, expert


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_plain_product(load):
    routing, slot, expert = routed(load)
    w = weight(1)
    x = jax.random.normal(jax.random.key(2), (48, K), jnp.bfloat16)
    out = np.asarray(product(x, lay_out(w), routing))[slot]
    want = np.einsum("rk,rnk->rn", np.asarray(x, np.float64), decode(w)[expert])
    for got, row in zip(out, want, strict=True):
        assert relative_error(got, row) < 2e-6


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("activation", ("silu", "clamped_swiglu"))
def test_gated_product_equals_the_reference(activation, load):
    routing, _, _ = routed(load)
    gate, up = weight(1), weight(2)
    x = jax.random.normal(jax.random.key(3), (24, K), jnp.bfloat16)
    x_outer = jnp.exp2(jnp.arange(24, dtype=jnp.float32) % 5 - 3)
    out = product(x, lay_out(gate, up), routing, x_outer=x_outer, activation=activation)
    want = em.expert_matmul(
        x, em.lay_out(gate, up), routing, x_outer=x_outer, activation=activation,
        version="reference",
    )  # fmt: skip
    # Sums in another order, then one rounding to BF16: now and then a neighbour.
    assert relative_error(out, want) < 5e-4


def test_both_layouts_hold_the_same_weights():
    gate, up = weight(1), weight(2)
    both = [em.decode_layout(em.lay_out(gate, up, layout)) for layout in ("tpu", "hopper")]
    np.testing.assert_array_equal(*both)


def test_refusals():
    routing, _, _ = routed(LOADS["even"])
    x, w = jnp.zeros((48, K), jnp.bfloat16), weight(1)
    with pytest.raises(ValueError, match="layout 'tpu', not 'hopper'"):
        em.expert_matmul(x, em.lay_out(w, layout="hopper"), routing, version="pallas_interpret")
    with pytest.raises(ValueError, match="needs a TPU"):
        em.expert_matmul(x, em.lay_out(w, layout="tpu"), routing, version="pallas_tpu")
    with pytest.raises(ValueError, match="layout 'hopper', not 'tpu'"):
        em.expert_matmul(x, em.lay_out(w, layout="tpu"), routing, version="hopper")
    with pytest.raises(ValueError, match="takes NVFP4, not BF16"):
        em.lay_out(jnp.zeros((2, 16, 32), jnp.bfloat16), layout="tpu")


def compile_for(topology, function, *shapes):
    """Compiles `function` for one chip of a TPU that is not here."""
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    here = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
    return jax.jit(function).lower(*shapes).compile()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("gated", (True, False), ids=("gate_up", "down"))
def test_compiles_ahead_of_time(topology, gated):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: TPU kernels are not compiled")
    experts, tokens = 16, 64
    n, k = (768, 2048) if gated else (2048, 768)
    parts = 2 if gated else 1
    shape = jax.ShapeDtypeStruct
    weights = em.ExpertWeights(
        shape((experts, parts, k // 2, n), jnp.uint8), shape((experts, 2), jnp.float32), True,
        gated, k, shape((experts, parts, k // 16, n), jnp.uint8), "tpu",
    )  # fmt: skip
    rows = tokens * TOP_K
    routing = em.Routing(shape((rows,), jnp.int32), shape((experts + 1,), jnp.int32))
    x = shape((tokens if gated else rows, k), jnp.bfloat16)
    run = partial(em._tpu, x_outer=None, activation="silu" if gated else None)
    text = compile_for(topology, run, x, weights, routing).as_text()
    assert "custom-call" in text and "tpu_custom_call" in text
