"""Weight sync: what the rollout gets is what the trainer computes with, and nothing older."""

from functools import partial

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DENSE, LAYERS, MOE, PRECISIONS, params_of, to_rollout

from trace_jax import fp4, sync
from trace_jax.model.layers import ExpertWeight, expert_weight

decoded = jax.jit(sync.decode_weights)
trainer_weight = jax.jit(expert_weight, static_argnums=1)


def scaled(params, factor):
    return jax.tree.map(lambda a: factor * a, params)


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def layer_stack(config=MOE):
    return params_of(config)["layers"]


def test_a_second_sync_of_the_same_weights_is_a_no_op():
    """BR-036, and BR-033: after W, a sync of 4W is a fresh one."""
    params, precision = params_of(MOE), PRECISIONS["nvfp4"]
    first = to_rollout(params, precision)
    larger = to_rollout(scaled(params, 4.0), precision)
    equal(to_rollout(params, precision), first)
    fresh = jax.jit(lambda p: sync.to_rollout(p, precision))(scaled(params, 4.0))
    equal(larger, fresh)
    # The sync is not stuck at the first weights either: codes stay, one scale takes the 4.
    for name in sync.EXPERT_WEIGHTS:
        a, b = first["layers"][0]["moe"][name], larger["layers"][0]["moe"][name]
        np.testing.assert_array_equal(a.packed, b.packed)
        np.testing.assert_array_equal(4 * fp4.dequantize(a), fp4.dequantize(b))


@pytest.mark.parametrize("policy", ["nvfp4", "mxfp4", "bf16"])
def test_rollout_weights_equal_the_trainers_fake_quantized_ones_bit_for_bit(policy):
    """BR-024."""
    stack = decoded(helpers.rollout_params_of(MOE, policy))["layers"][0]["moe"]
    for name in sync.EXPERT_WEIGHTS:
        master = layer_stack()["moe"][name]
        for i in range(LAYERS):
            mine = trainer_weight(master[i], PRECISIONS[policy][i].expert_weight)
            if policy == "bf16":
                np.testing.assert_array_equal(stack[name][i], mine.values)
                continue
            assert isinstance(stack[name], ExpertWeight)
            np.testing.assert_array_equal(stack[name].values[i], mine.values)
            theirs = np.broadcast_to(stack[name].outer[i], np.shape(mine.outer))
            np.testing.assert_array_equal(theirs, mine.outer)
            error = np.asarray(mine.values.astype(jnp.float32) * mine.outer - master[i])
            assert 0.05 < error.std() / np.asarray(master[i]).std() < 0.25


def test_gate_and_up_share_an_outer_scale_and_experts_do_not():
    """BR-019: amax / 2688 of each expert alone."""
    stack = dict(layer_stack())
    inner = MOE.expert_dim
    weight = stack["moe"]["gate_up"].at[:, 0].multiply(0.01).at[:, 1, :inner].multiply(100.0)
    params = params_of(MOE) | {"layers": stack | {"moe": stack["moe"] | {"gate_up": weight}}}
    q = to_rollout(params, PRECISIONS["nvfp4"])["layers"][0]["moe"]["gate_up"]
    source = np.asarray(weight.astype(jnp.bfloat16).astype(jnp.float32))
    assert q.outer.shape == (LAYERS, MOE.num_experts, 1, 1)
    amax = np.abs(source).max(axis=(2, 3))
    np.testing.assert_allclose(q.outer[..., 0, 0], amax / 2688, rtol=1e-6)
    # `up` of expert 1 is small beside its `gate`, whose scale it has.
    assert (np.abs(source[:, 1, inner:]).max(axis=(1, 2)) < 0.05 * amax[:, 1]).all()


def test_router_and_norms_stay_fp32_and_the_rest_becomes_bf16():
    rolled = helpers.rollout_params_of(MOE, "nvfp4")
    layer, attention = rolled["layers"][0], rolled["layers"][0]["attention"]
    norms = [layer["attention_norm"], layer["moe_norm"], attention["q_norm"], attention["k_norm"]]
    weights = [norm["weight"] for norm in (*norms, rolled["final_norm"])]
    for kept in (layer["moe"]["router"], *weights):
        assert kept.dtype == jnp.float32
    np.testing.assert_array_equal(layer["moe"]["router"], layer_stack()["moe"]["router"])
    for name in "qkvo":
        weight = attention[name]["weight"]
        assert weight.dtype == jnp.bfloat16
        master = layer_stack()["attention"][name]["weight"]
        np.testing.assert_array_equal(weight, master.astype(jnp.bfloat16))
    assert rolled["embed"].dtype == jnp.bfloat16
    for name in sync.EXPERT_WEIGHTS:
        assert isinstance(layer["moe"][name], fp4.QTensor)


def test_layers_of_a_mixed_policy_keep_their_order():
    runs = helpers.rollout_params_of(MOE, "mixed")["layers"]
    assert len(runs) == 3
    assert [isinstance(run["moe"]["down"], fp4.QTensor) for run in runs] == [True, False, True]
    for i, run in enumerate(runs):
        np.testing.assert_array_equal(run["moe"]["router"][0], layer_stack()["moe"]["router"][i])
    np.testing.assert_array_equal(
        runs[1]["moe"]["down"][0], layer_stack()["moe"]["down"][1].astype(jnp.bfloat16)
    )


@pytest.mark.parametrize(
    "run, policy",
    [(sync.to_rollout, "bf16"), (to_rollout, "bf16"), (to_rollout, "nvfp4")],
    ids=["eager-bf16", "compiled-bf16", "compiled-nvfp4"],
)
def test_the_learner_may_donate_its_parameters_after_a_sync(run, policy):
    """No buffer is shared, whether the sync is compiled or not."""
    params = jax.tree.map(jnp.copy, params_of(DENSE))
    rolled = run(params, PRECISIONS[policy])
    held = jax.device_get(jax.tree.map(jnp.copy, rolled))
    mine, theirs = (
        {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}
        for tree in (params, rolled)
    )
    assert not mine & theirs
    partial(jax.jit, donate_argnums=0)(lambda p: scaled(p, 2.0))(params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    equal(jax.device_get(rolled), held)


def test_weight_bytes_count_codes_scales_and_outer_scales():
    """0.5 byte a value, one a block of 16 and 4 an expert; FP32 norms and router."""
    cfg = MOE
    attention = cfg.hidden * cfg.head_dim * (2 * cfg.num_heads + 2 * cfg.num_kv_heads)
    norms = cfg.num_experts * cfg.hidden + 2 * cfg.hidden + 2 * cfg.head_dim
    rest = 2 * cfg.vocab_size * cfg.hidden + 4 * cfg.hidden
    blocks = {"gate_up": (2 * cfg.expert_dim, 3), "down": (cfg.hidden, 3)}  # rows, blocks a row
    fp4_bytes = sum(cfg.num_experts * (rows * n * (8 + 1) + 4) for rows, n in blocks.values())
    bf16_bytes = cfg.num_experts * 3 * cfg.hidden * cfg.expert_dim * 2
    for policy, experts in (("nvfp4", fp4_bytes), ("bf16", bf16_bytes)):
        wanted = LAYERS * (2 * attention + 4 * norms + experts) + rest
        assert sync.weight_bytes(helpers.rollout_params_of(MOE, policy)) == wanted, policy


def test_the_router_s_bf16_parts_add_up_to_it():
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(8, 64)) * 0.02, jnp.float32)
    parts = np.asarray(jax.jit(sync.bf16_parts)(weights), np.float64)
    assert parts.shape == (3, 8, 64)
    np.testing.assert_array_equal(parts.sum(0), np.asarray(weights, np.float64))
