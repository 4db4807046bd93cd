"""Experts spread over devices: every slot of the exchanges, and a model on 1 and on 8 devices."""

import dataclasses
import importlib.util
import os
import re
from functools import cache, partial

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FULL, MOE, params_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from run_helpers import QUICK, share_compiled, tiny

from trace_jax import model
from trace_jax.config import MeshConfig
from trace_jax.fp4 import PrecisionPolicy, Rule
from trace_jax.model import expert_parallel
from trace_jax.model.expert_parallel import over_experts
from trace_jax.parallel import ACTOR, make_mesh, shard_params, shard_rows, token_layout
from trace_jax.trainer import Trainer

EXPERTS, TOP_K, BATCH, LENGTH, WIDTH = 8, 3, 8, 4, 5
MESHES = [
    {"data": 4, "expert": 2},
    {"data": 2, "expert": 4},
    {"data": 1, "expert": 8},
]
ids_of = lambda sizes: "x".join(f"{axis}{n}" for axis, n in sizes.items())


# --- the exchanges ------------------------------------------------------------------------


def chosen(kind: str, batch: int = BATCH) -> np.ndarray:
    """int32 [batch, LENGTH, TOP_K] different experts of each token."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((batch, LENGTH, EXPERTS)), axis=-1)[..., :TOP_K]
    if kind == "crowded":  # every token chooses the experts of the first devices
        ids = np.broadcast_to(np.arange(TOP_K), ids.shape)
    if kind == "one sequence crowds":
        ids[0] = [7, 6, 5]
    return ids.astype(np.int32)


def scaled(x, ids, weights, beside, key):
    """Stands for the experts: x times the expert's factor plus what came beside it, and both."""
    factor = jnp.pad(weights, (0, 1), constant_values=jnp.nan)[ids]
    value = x[:, None] * factor[..., None] + beside["add"][..., None]
    return {"value": value, "tag": beside["tag"] + jnp.uint8(1)}


def inputs(kind: str, batch: int = BATCH):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(batch, LENGTH, WIDTH)).astype(np.float32)
    slots = (batch, LENGTH, TOP_K)
    beside = {
        "add": rng.normal(size=slots).astype(np.float32),
        "tag": rng.integers(0, 250, slots).astype(np.uint8),
    }
    return x, chosen(kind, batch), rng.normal(size=EXPERTS).astype(np.float32), beside


@partial(jax.jit, static_argnames="layout")
def exchanged(layout, x, ids, weights, beside, direction):
    def total(x, weights):
        out = over_experts(layout, scaled, x, ids, weights, beside, None)
        return jnp.sum(out["value"] * direction), out

    (_, out), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(x, weights)
    return out, gradients


def check(sizes: dict, kind: str, batch: int = BATCH) -> None:
    """Every slot has the value, and every gradient the sum, that a loop in NumPy gives."""
    x, ids, weights, beside = inputs(kind, batch)
    direction = np.random.default_rng(2).normal(size=(*ids.shape, WIDTH)).astype(np.float32)
    layout = token_layout(make_mesh(MeshConfig(**sizes)))
    out, (dx, dw) = exchanged(layout, x, ids, weights, beside, direction)
    factor = weights[ids][..., None]
    np.testing.assert_allclose(
        out["value"], x[:, :, None] * factor + beside["add"][..., None], rtol=1e-6, atol=1e-6
    )
    np.testing.assert_array_equal(out["tag"], beside["tag"] + 1)
    np.testing.assert_allclose(dx, np.sum(direction * factor, axis=2), rtol=1e-5, atol=1e-6)
    wanted = np.zeros(EXPERTS)
    np.add.at(wanted, ids, np.sum(direction * x[:, :, None], axis=-1))
    np.testing.assert_allclose(dw, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["even", "crowded", "one sequence crowds"])
@pytest.mark.parametrize("sizes", [*MESHES, {"data": 1, "fsdp": 2, "expert": 4}], ids=ids_of)
def test_every_slot_is_served_and_learns(sizes, kind):
    """BR-079, BR-149: dropless whatever the load; an expert that nobody chose has gradient 0."""
    check(sizes, kind)


def test_the_backward_pass_holds_one_round_at_a_time():
    """Of 12 slots a device sends each of 8 others 3 at once: a round of 24 rows, and 3 further."""
    layout = token_layout(make_mesh(MeshConfig(data=1, expert=8)))
    x, ids, weights, beside = inputs("even")
    direction = np.ones((*ids.shape, WIDTH), np.float32)
    text = exchanged.lower(layout, x, ids, weights, beside, direction).as_text()
    assert f"tensor<24x{WIDTH}xf32>" in text
    assert re.findall(r"tensor<3x24x[^>]*>", text) == []


def test_outputs_of_a_weight_are_gathered_in_its_dtype_and_its_gradient_is_kept_in_parts():
    """Over "fsdp": half the bytes of a sum that everyone gets, and no whole gradient stays."""
    x, ids, _, beside = inputs("even")
    rng = np.random.default_rng(3)
    part = rng.normal(size=(1, 4, 2)).astype(np.float32)
    weights = jnp.asarray(rng.normal(size=(EXPERTS, 4, 2)), jnp.bfloat16)
    layout = token_layout(make_mesh(MeshConfig(data=1, fsdp=2, expert=4)))

    def total(weights):
        run = lambda x, ids, weights, *given: scaled(
            x, ids, jnp.sum(weights * part, (1, 2)), *given
        )
        return jnp.sum(over_experts(layout, run, x, ids, weights, beside, None)["value"])

    lowered = jax.jit(jax.value_and_grad(total)).lower(weights)
    wanted = np.zeros(EXPERTS)
    np.add.at(wanted, ids, np.sum(np.broadcast_to(x[:, :, None], (*ids.shape, WIDTH)), -1))
    wanted = wanted[:, None, None] * part
    np.testing.assert_allclose(lowered.compile()(weights)[1], wanted, rtol=0.01, atol=0.01)
    text = lowered.as_text()
    gathered = re.findall(r"all_gather.*tensor<2x2x2x(\w+)>\) -> tensor<2x4x2x", text)
    scattered = re.findall(r"\(tensor<2x4x2x(\w+)>\) -> tensor<2x2x2x", text)
    assert (gathered, scattered) == (["bf16"], ["f32"])


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "expert": 4}], ids=ids_of)
def test_a_batch_that_does_not_divide_is_filled_up_and_cut_again(sizes):
    check(sizes, "even", batch=3)


def test_a_sequence_may_be_cut_too():
    check({"data": 1, "expert": 4, "context": 2}, "crowded")


def emulated(operand, output, starts, sizes, lands, arrives, *, axis_name):
    """ragged_all_to_all, which CPUs lack, from its definition."""
    told = [jax.lax.all_gather(a, axis_name) for a in (operand, starts, sizes, lands)]
    me, at = jax.lax.axis_index(axis_name), jnp.arange(len(operand))
    for sender in range(len(told[0])):
        rows, start, size, land = told[0][sender], *(a[sender][me] for a in told[1:])
        size = jnp.where(size == arrives[sender], size, len(output) * 2)  # both must agree
        place = jnp.where(at < size, land + at, len(output))
        taken = rows.at[start + at].get(mode="fill", fill_value=0)
        output = output.at[place].set(taken, mode="drop")
    return output


@pytest.mark.parametrize("kind", ["even", "crowded"])
def test_parts_of_unequal_size_are_the_same_exchange(monkeypatch, kind):
    """What GPUs and TPUs run, but for the collective itself."""
    exchanged.clear_cache()
    monkeypatch.setattr(expert_parallel, "RAGGED", ("cpu",))
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    check({"data": 2, "expert": 4}, kind)
    exchanged.clear_cache()


@pytest.mark.parametrize("topology", ["v6e:2x2"])
def test_parts_of_unequal_size_compile_ahead_of_time(topology):
    """Four chips that are not here; both exchanges and their gradients, and no other big move."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: nothing is compiled for TPUs")
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    layout = token_layout(make_mesh(MeshConfig(expert=4), chips))
    x, ids, weights, beside = inputs("even")
    arguments = (x, ids, weights, beside, np.zeros((*ids.shape, WIDTH), np.float32))
    specs = (layout.spec, layout.spec, P("expert"), layout.spec, layout.spec)

    def shapes(spec, tree):
        sharding = NamedSharding(layout.mesh, spec)
        like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        return jax.tree.map(like, tree)

    text = exchanged.lower(layout, *map(shapes, specs, arguments)).compile().as_text()
    assert "ragged-all-to-all" in text
    assert not re.search(r" (all-to-all|all-gather)(-start)?\(", text)


# --- a model ------------------------------------------------------------------------------

CONFIG = dataclasses.replace(MOE, num_experts=EXPERTS, num_layers=2)
PRECISION = PrecisionPolicy((Rule("*", "nvfp4"),)).resolve(2)


@partial(jax.jit, static_argnames="layout", compiler_options=QUICK)
def step(layout, params, tokens, direction, guidance, routes):
    """Hidden states, logits, record, balance loss, and gradients, of a guided forward that
    replays routes."""
    spec = model.numerics(
        CONFIG, PRECISION, layout=layout, record=True, plan=FULL, guide=guidance is not None
    )

    def total(params):
        out = model.apply(CONFIG, params, tokens, spec, guidance=guidance, routes=routes)
        logits = model.logits(params, out.hidden)
        return jnp.sum(logits * direction) + out.balance, (
            out.hidden,
            logits,
            out.record,
            out.balance,
        )

    (_, left), gradients = jax.value_and_grad(total, has_aux=True)(params)
    return left, gradients


@cache
def example():
    """Arguments of `step`: the guidance and routes are those of other parameters."""
    tokens = helpers.random_tokens(BATCH, LENGTH, seed=3)
    direction = np.random.default_rng(0).normal(size=(BATCH, LENGTH, CONFIG.vocab_size))
    direction = jnp.asarray(direction, jnp.float32)
    (*_, record, _), _ = step(None, params_of(CONFIG, 1), tokens, direction, None, None)
    recorded = jnp.arange(LENGTH)[None] < jnp.arange(1, BATCH + 1)[:, None]
    routes = jnp.where(recorded[None, ..., None], record.routes, model.NOT_RECORDED)
    guidance = model.Guidance(record.sites, recorded, jnp.zeros(BATCH, jnp.int32))
    return tokens, direction, guidance, routes


@cache
def on_one():
    return jax.device_get(step(None, params_of(CONFIG), *example()))


def placed(mesh):
    """The arguments as the learner holds them."""
    tokens, direction, guidance, routes = example()
    layers = NamedSharding(mesh, P(None, token_layout(mesh).rows))
    by_layer = lambda tree: jax.tree.map(lambda a: jax.device_put(a, layers), tree)
    flat = shard_rows((tokens, direction, guidance.recorded, guidance.version), mesh)
    guidance = guidance.replace(sites=by_layer(guidance.sites), recorded=flat[2], version=flat[3])
    return shard_params(params_of(CONFIG), mesh), *flat[:2], guidance, by_layer(routes)


def relative_error(got, wanted) -> float:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30))


def assert_computes_what_one_does(sizes: dict) -> None:
    mesh = make_mesh(MeshConfig(**sizes))
    (hidden, logits, record, balance), gradients = on_one()
    got, got_gradients = step(token_layout(mesh), *placed(mesh))
    assert len(got[0].sharding.device_set) == 8
    np.testing.assert_array_equal(got[0], hidden)
    jax.tree.map(np.testing.assert_array_equal, got[2], record)
    # Products and sums of FP32 results: their order is another for another number of rows.
    np.testing.assert_allclose(got[1], logits, rtol=0, atol=2e-6)
    assert float(got[3]) == pytest.approx(float(balance), rel=1e-6)
    errors = jax.tree.map(relative_error, got_gradients, gradients)
    assert max(jax.tree.leaves(errors)) < 1e-6, errors


@pytest.mark.parametrize("sizes", [{"data": 1, "fsdp": 4, "expert": 2}, *MESHES[1:]], ids=ids_of)
def test_eight_devices_compute_what_one_does(sizes):
    """Hidden states, codes, scales and routes to the bit: sums over a token's experts stay with
    the token. Gradients to FP32's last bits: devices sum theirs in another order.
    """
    assert_computes_what_one_does(sizes)


def test_a_cut_sequence_computes_the_same():
    """The context axis: attention reads the keys and values of the other part."""
    assert_computes_what_one_does({"data": 2, "expert": 2, "context": 2})


def test_a_rollout_draws_the_same_tokens_and_leaves_the_same_record():
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    config = dataclasses.replace(CONFIG, num_layers=helpers.LAYERS)
    wanted = helpers.rollout("nvfp4", config)
    engine = helpers.engine("nvfp4", config, layout=token_layout(mesh, ACTOR))
    params = helpers.to_rollout(shard_params(params_of(config), mesh), helpers.PRECISIONS["nvfp4"])
    got = engine(params, *helpers.prompts(), helpers.keys(), version=3)
    # FP32 sums over the vocabulary: their order is another for another number of rows.
    np.testing.assert_allclose(got.logp, wanted.logp, rtol=0, atol=2e-6)
    exact = lambda rollout: rollout.replace(logp=None)
    jax.tree.map(np.testing.assert_array_equal, exact(got), exact(wanted))


# --- a run --------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_iteration_of_the_loop_is_the_same(monkeypatch, tmp_path):
    """Samples, rewards and code agreement exactly; the loss but for the order of FP32 sums."""

    def iteration(mesh: dict, devices: int) -> dict:
        share_compiled(monkeypatch)
        chosen = jax.devices()[:devices]
        monkeypatch.setattr("trace_jax.trainer.make_mesh", lambda c: make_mesh(c, chosen))
        trainer = Trainer(tiny(mesh=mesh), tmp_path / str(devices))
        state, metrics = trainer.iteration(0, trainer.start(trainer.fresh_params()))
        return jax.device_get(state["train"].params), metrics

    params, wanted = iteration({}, 1)
    got_params, got = iteration({"data": 2, "expert": 4}, 8)
    assert got.keys() == wanted.keys()
    exact = ("reward/", "rollout/", "agreement/", "mismatch/tokens", "guidance/")
    for name in wanted:
        if name.startswith(exact):
            assert got[name] == wanted[name], name
    for name in ("train/loss", "train/grad_norm", "train/entropy", "train/balance"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
    errors = jax.tree.map(relative_error, got_params, params)
    assert max(jax.tree.leaves(errors)) < 1e-4, errors
