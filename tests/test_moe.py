"""Routing, replay, balance loss, and the expert layer against a loop in NumPy."""

import dataclasses
import re
from functools import partial

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import fp4, model
from trace_jax.fp4 import PrecisionPolicy, Rule
from trace_jax.kernels.grouped_matmul import group_tokens
from trace_jax.model import layers
from trace_jax.model.config_parts import Router
from trace_jax.model.moe import NOT_RECORDED, MoE, load_balance_loss, route
from trace_jax.model.sites import LayerSpec, SiteInputs, Sites

routed = jax.jit(route, static_argnums=(1, 2, 4))
balance = jax.jit(
    lambda logits, valid, top_k: load_balance_loss(route(logits, top_k, True, None), valid),
    static_argnums=2,
)


def choose(logits, top_k, norm_topk=True, replay=None):
    return routed(jnp.asarray(logits, jnp.float32), top_k, norm_topk, replay)


# --- the router ------------------------------------------------------------------


def test_equal_logits_go_to_the_lower_index():
    """BR-075."""
    ids = choose([[1.0, 3.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [2.0, 1.0, 2.0, 2.0]], 2).ids
    np.testing.assert_array_equal(ids, [[1, 0], [0, 1], [0, 2]])


def test_logits_closer_than_a_bfloat16_step_are_told_apart():
    """BR-075: 8.0 and 8.001 are one number in BF16, whose steps are 1/16 there."""
    out = choose([[8.0, 8.001, 0.0, 8.002]], 2)
    np.testing.assert_array_equal(out.ids, [[3, 1]])
    assert out.gates.dtype == jnp.float32 and out.gates[0, 0] > out.gates[0, 1]


def test_only_one_finite_score_still_gives_different_experts():
    """BR-088."""
    out = choose([[-np.inf, 3.0, -np.inf, -np.inf]], 3)
    assert out.ids[0, 0] == 1 and sorted(out.ids[0].tolist()) == [0, 1, 2]
    np.testing.assert_array_equal(out.gates, [[1.0, 0.0, 0.0]])


def test_gates_are_the_chosen_probabilities_normalised_if_asked():
    logits = np.array([[2.0, 0.0, 1.0, -1.0]])
    probs = np.exp(logits) / np.exp(logits).sum()
    chosen = probs[:, [0, 2]]
    np.testing.assert_allclose(choose(logits, 2, norm_topk=False).gates, chosen, rtol=1e-6)
    np.testing.assert_allclose(choose(logits, 2).gates, chosen / chosen.sum(), rtol=1e-6)


def test_groups_are_masked_with_minus_infinity():
    """BR-079: with 0 as the mask the experts of the worse group would win."""
    logits = jnp.full((1, 4), -3.0)
    correction = jnp.array([-0.1, -0.2, -0.5, -0.6]) - jax.nn.sigmoid(-3.0)
    router = Router("sigmoid", groups=2, top_groups=1, group_best=2, correction=True)
    out = routed(logits, 2, True, None, router, correction)
    np.testing.assert_array_equal(out.ids, [[0, 1]])


@pytest.mark.parametrize("best, ids", [(1, [2, 3]), (2, [0, 1])])
def test_a_group_is_as_good_as_its_best_experts(best, ids):
    """DeepSeek-V2 takes a group's best expert, V3 the sum of its two best."""
    router = Router(groups=2, top_groups=1, group_best=best)
    out = routed(jnp.array([[0.5, 0.4, 0.6, 0.1]]), 2, False, None, router)
    np.testing.assert_array_equal(np.sort(out.ids), [ids])


def test_the_correction_chooses_and_does_not_weigh():
    logits, correction = jnp.array([[2.0, 1.0, 0.0, -1.0]]), jnp.array([0.0, 0.0, 0.0, 5.0])
    router = Router("sigmoid", correction=True, scale=2.5)
    out = routed(logits, 2, False, None, router, correction)
    np.testing.assert_array_equal(out.ids, [[3, 0]])
    sigmoid = 1 / (1 + np.exp([1.0, -2.0]))
    np.testing.assert_allclose(out.gates, [2.5 * sigmoid], rtol=1e-6)
    normed = routed(logits, 2, True, None, router, correction)
    np.testing.assert_allclose(normed.gates, [2.5 * sigmoid / sigmoid.sum()], rtol=1e-6)
    assert float(jnp.sum(out.probs)) == pytest.approx(1.0)


@pytest.mark.parametrize("gated, share", [(True, 0.5), (False, 1.0)])
def test_the_shared_expert_goes_through_its_gate(gated, share):
    """BR-082: at a gate's logit of 0, half of its output; all of it without a gate."""
    config = dataclasses.replace(
        helpers.MOE, shared_dim=24, shared_gate=gated, dtype="float32", num_layers=1
    )
    x = jax.random.normal(jax.random.key(0), (1, 3, config.hidden))
    sites = Sites(LayerSpec(fp4.LayerPrecision()), fp4.NO_GUIDANCE, SiteInputs())
    layer, valid = MoE(config), jnp.ones((1, 3), bool)
    params = layer.init(jax.random.key(1), x, valid, sites)["params"]
    if gated:
        params["shared_gate"]["weight"] *= 0
    whole = layer.apply({"params": params}, x, valid, sites)[0]
    gate, up = (x @ params["shared"][name]["weight"].T for name in ("gate", "up"))
    shared = (jax.nn.silu(gate) * up) @ params["shared"]["down"]["weight"].T
    params["shared"]["down"]["weight"] *= 0
    routed_only = layer.apply({"params": params}, x, valid, sites)[0]
    np.testing.assert_allclose(whole - routed_only, share * shared, atol=1e-5)
    assert float(jnp.std(shared)) > 0.05


@pytest.mark.parametrize("norm_topk", [True, False])
def test_a_replayed_expert_weighs_as_the_live_router_sees_it_and_learns(norm_topk):
    """BR-086: gathered from the zeroed top-k it would weigh 0 and have no gradient."""
    logits = jnp.array([[5.0, 1.0, -2.0, 4.0]])
    replay = jnp.array([[2, 0]], jnp.int32)  # the live router chooses 0 and 3
    out = choose(logits, 2, norm_topk, replay)
    probs = np.asarray(jax.nn.softmax(logits))[0]
    wanted = probs[[2, 0]] / (probs[[2, 0]].sum() if norm_topk else 1.0)
    np.testing.assert_array_equal(out.ids, replay)
    np.testing.assert_allclose(out.gates[0], wanted, rtol=1e-6)

    gradient = jax.grad(lambda x: route(x, 2, norm_topk, replay).gates[0, 0])(logits)[0]
    p, q = wanted[0], probs[2]
    slope = p * (1 - p) if norm_topk else q * (1 - q)
    np.testing.assert_allclose(gradient[2], slope, rtol=1e-5)
    assert abs(gradient[0]) > 0


def test_a_token_without_recorded_route_takes_the_live_one():
    """BR-085: NOT_RECORDED is a state of its own, not expert -1 and not expert 0."""
    logits = np.array([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])
    replay = jnp.array([[NOT_RECORDED, NOT_RECORDED], [1, 0]], jnp.int32)
    free, out = choose(logits, 2), choose(logits, 2, True, replay)
    np.testing.assert_array_equal(out.ids, [[3, 2], [1, 0]])
    np.testing.assert_array_equal(out.gates[0], free.gates[0])
    np.testing.assert_allclose(jnp.sum(out.gates, axis=-1), 1.0, rtol=1e-6)


# --- the balance loss --------------------------------------------------------------


def test_balance_loss_takes_softmax_once():
    """BR-077: probabilities .7112 and .0963; softmaxed again they would be near uniform."""
    logits = jnp.array([[2.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(choose(logits, 1).probs[0, :2], [0.7112, 0.0963], atol=5e-5)
    valid = jnp.ones(1, bool)
    np.testing.assert_allclose(balance(logits, valid, 1), 4 * 0.711235, rtol=1e-5)
    np.testing.assert_allclose(balance(logits, valid, 2), 2 * (0.711235 + 0.096255), rtol=1e-5)


def test_balance_loss_is_one_when_uniform_and_the_number_of_experts_when_collapsed():
    turns = jnp.asarray(5.0 * np.eye(4), jnp.float32)
    np.testing.assert_allclose(balance(turns, jnp.ones(4, bool), 1), 1.0, rtol=1e-6)
    one = jnp.tile(jnp.array([[50.0, 0.0, 0.0, 0.0]]), (4, 1))
    np.testing.assert_allclose(balance(one, jnp.ones(4, bool), 1), 4.0, rtol=1e-6)


def test_balance_loss_does_not_count_padding():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
    valid = jnp.arange(6) < 4
    np.testing.assert_allclose(
        balance(logits, valid, 2), balance(logits[:4], jnp.ones(4, bool), 2), rtol=1e-6
    )
    assert balance(logits, jnp.zeros(6, bool), 2) == 0


# --- the layer ------------------------------------------------------------------------

BATCH, TOKENS = 2, 9


def layer_params(config, seed=0):
    rng = np.random.default_rng(seed)
    experts = max(config.num_experts, 1)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {
        "gate_up": normal(experts, 2 * config.expert_dim, config.hidden) * config.hidden**-0.5,
        "down": normal(experts, config.hidden, config.expert_dim) * config.expert_dim**-0.5,
    }
    if config.num_experts:
        params["router"] = normal(experts, config.hidden)
    return params, normal(BATCH, TOKENS, config.hidden)


@partial(jax.jit, static_argnums=0)
def run_layer(config, params, x, routes=None):
    sites = Sites(LayerSpec(fp4.LayerPrecision()), fp4.NO_GUIDANCE, SiteInputs())
    valid = jnp.ones(x.shape[:2], bool)
    return MoE(config).apply({"params": params}, x.astype(jnp.bfloat16), valid, sites, routes)


@partial(jax.jit, static_argnums=0)
def layer_gradients(config, params, x, direction):
    total = lambda params: jnp.sum(run_layer(config, params, x)[0].astype(jnp.float32) * direction)
    return jax.grad(total)(params)


def bf16(a):
    return np.asarray(jnp.asarray(a).astype(jnp.bfloat16).astype(jnp.float32), np.float64)


def mlp(x, gate_up, down):
    gate, up = np.split(x @ bf16(gate_up).T, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ bf16(down).T


def layer_reference(config, params, x):
    """A loop over tokens and their chosen experts, float64."""
    tokens = bf16(x).reshape(-1, config.hidden)
    logits = tokens @ params["router"].astype(np.float64).T
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, : config.top_k]
    y = np.zeros_like(tokens)
    for t, token in enumerate(tokens):
        total = probs[t, ids[t]].sum()
        for e in ids[t]:
            y[t] += probs[t, e] / total * mlp(token, params["gate_up"][e], params["down"][e])
    return y.reshape(x.shape), ids.reshape(BATCH, TOKENS, -1)


def relative_error(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def test_the_layer_equals_a_loop_over_its_experts():
    params, x = layer_params(helpers.MOE)
    y, ids, _ = run_layer(helpers.MOE, params, x)
    wanted, wanted_ids = layer_reference(helpers.MOE, params, x)
    np.testing.assert_array_equal(ids, wanted_ids)
    assert relative_error(y.astype(jnp.float32), wanted) < 0.005


def skewed(config):
    """Parameters and tokens of which all go to experts 2 and 1."""
    params, x = layer_params(config)
    params["router"][:] = np.array([-0.1, 0.1, 0.11, -0.2])[:, None]
    return params, np.abs(x)


def test_no_token_is_dropped_when_all_want_the_same_experts():
    params, x = skewed(helpers.MOE)
    y, ids, _ = run_layer(helpers.MOE, params, x)
    np.testing.assert_array_equal(ids, np.broadcast_to([2, 1], ids.shape))
    groups = group_tokens(ids.reshape(-1, 2), 4)
    np.testing.assert_array_equal(groups.sizes, [0, BATCH * TOKENS, BATCH * TOKENS, 0])
    assert relative_error(y.astype(jnp.float32), layer_reference(helpers.MOE, params, x)[0]) < 0.005


@pytest.mark.parametrize("tokens, top_k", [(1, 1), (7, 2), (64, 3)])
def test_every_slot_has_a_row_of_its_own_in_its_experts_tiles(tokens, top_k):
    """Dropless: the sizes sum to tokens x top_k whatever the skew."""
    rng = np.random.default_rng(tokens)
    order = np.argsort(rng.random((tokens, 4)) * [1, 1, 1, 9], axis=1)  # expert 3 is rare
    ids = order[:, :top_k].astype(np.int32)
    groups = group_tokens(jnp.asarray(ids), 4)
    assert int(jnp.sum(groups.sizes)) == tokens * top_k
    np.testing.assert_array_equal(groups.sizes, np.bincount(ids.ravel(), minlength=4))
    rows = np.asarray(groups.row)
    assert len(np.unique(rows)) == tokens * top_k
    tile = groups.slot.size // groups.tile_expert.size
    np.testing.assert_array_equal(np.asarray(groups.tile_expert)[rows // tile], ids)


def test_experts_without_tokens_get_zero_and_the_others_finite_gradients():
    """BR-084."""
    params, x = skewed(helpers.MOE)
    direction = np.random.default_rng(5).normal(size=x.shape).astype(np.float32)
    gradients = layer_gradients(helpers.MOE, params, x, direction)
    for name in ("gate_up", "down"):
        size = np.abs(np.asarray(gradients[name])).max(axis=(1, 2))
        assert np.isfinite(size).all() and (size[[0, 3]] == 0).all(), name
        assert (size[[1, 2]] > 1e-3).all(), name
    assert np.isfinite(np.asarray(gradients["router"])).all()


def test_the_layer_replays_routes_and_weighs_them_by_its_own_router():
    params, x = layer_params(helpers.MOE)
    _, ids, _ = run_layer(helpers.MOE, params, x)
    other = (3 - ids).at[0, 0].set(NOT_RECORDED)
    y, used, _ = run_layer(helpers.MOE, params, x, other)
    np.testing.assert_array_equal(used[0, 0], ids[0, 0])
    np.testing.assert_array_equal(used[1], other[1])
    token = bf16(x)[1, 2]
    logits = token @ params["router"].astype(np.float64).T
    chosen = np.asarray(other[1, 2])
    gate = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
    wanted = sum(
        g * mlp(token, params["gate_up"][e], params["down"][e])
        for g, e in zip(gate, chosen, strict=True)
    )
    assert relative_error(y[1, 2].astype(jnp.float32), wanted) < 0.01


def test_without_experts_the_layer_is_a_plain_mlp():
    config = helpers.DENSE
    params, x = layer_params(config)
    y, ids, loss = run_layer(config, params, x)
    wanted = mlp(bf16(x), params["gate_up"][0], params["down"][0])
    assert relative_error(y.astype(jnp.float32), wanted) < 0.005
    assert ids.shape == (BATCH, TOKENS, 1) and not np.asarray(ids).any() and loss == 0


def test_one_expert_of_one_weighs_as_a_dense_layer():
    """Its gate is 1: a routed layer with a single expert is the dense one."""
    config = dataclasses.replace(helpers.MOE, num_experts=1, top_k=1)
    params, x = layer_params(config)
    dense = {k: v for k, v in params.items() if k != "router"}
    np.testing.assert_array_equal(
        run_layer(config, params, x)[0], run_layer(helpers.DENSE, dense, x)[0]
    )


def test_router_product_asks_for_full_fp32_precision():
    """BR-053: elsewhere than on CPU a default FP32 product may run in TF32 or BF16 passes."""
    config = helpers.MOE
    layer = MoE(config)
    x = jnp.zeros((1, 3, config.hidden), jnp.bfloat16)
    valid = jnp.ones((1, 3), bool)
    sites = Sites(LayerSpec(fp4.LayerPrecision()), fp4.NO_GUIDANCE, SiteInputs())
    params = layer.init(jax.random.key(0), x, valid, sites)
    jaxpr = jax.make_jaxpr(lambda p, x: layer.apply(p, x, valid, sites)[1])(params, x)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    router = [e for e in products if e.outvars[0].aval.shape == (3, 4)]
    assert len(router) == 1
    assert all(v.aval.dtype == jnp.float32 for v in router[0].invars)
    assert set(router[0].params["precision"]) == {jax.lax.Precision.HIGHEST}


def one_layer(params, rule: str):
    """A forward of one layer, lowered."""
    config = dataclasses.replace(helpers.MOE, num_layers=1)
    numerics = model.numerics(config, PrecisionPolicy((Rule("*", rule),)).resolve(1))
    tokens = jnp.zeros((2, 8), jnp.int32)
    return jax.jit(lambda p: model.apply(config, p, tokens, numerics).hidden).lower(params)


def barriers(params, rule: str) -> set[str]:
    """Shapes of what it makes before it reads it."""
    text = one_layer(params, rule).as_text()
    return set(re.findall(r"optimization_barrier .*: tensor<(.*)>", text))


def test_what_is_gathered_by_tile_is_made_once(monkeypatch):
    """No codec and no cast runs once a tile; weights that are stored are read by tile alone."""
    monkeypatch.setattr(layers, "platform", lambda: "gpu")
    config = dataclasses.replace(helpers.MOE, num_layers=1)
    masters = jax.eval_shape(lambda key: model.init(config, key), jax.random.key(0))
    hidden, width = config.hidden, config.expert_dim
    weights = {f"4x{2 * width}x{hidden}xbf16", f"4x{hidden}x{width}xbf16"}
    tokens = {f"2x8x{hidden}xbf16"}
    assert barriers(masters, "nvfp4") == barriers(masters, "bf16") == weights | tokens
    rollout = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), masters)
    assert barriers(rollout, "bf16") == tokens


def test_the_cpu_compiler_puts_no_codec_where_rows_are_gathered():
    """It did, and a guided step took 1.6 times as long."""
    config = dataclasses.replace(helpers.MOE, num_layers=1)
    masters = jax.eval_shape(lambda key: model.init(config, key), jax.random.key(0))
    parts = one_layer(masters, "nvfp4").compile().as_text().split("\n\n")
    gathers = [part for part in parts if re.search(r"-> bf16.*\{(.|\n)* gather\(", part)]
    codecs = [part for part in parts if "bitcast-convert" in part]
    assert gathers and codecs and not set(gathers) & set(codecs)
