"""Meshes of 8 CPU devices: sizes, layout, and results that do not depend on them."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LAYERS, MOE, params_of
from jax.sharding import PartitionSpec as P

from trace_jax import fp4, model
from trace_jax.config import ConfigError, MeshConfig
from trace_jax.fp4 import PrecisionPolicy, Rule
from trace_jax.parallel import make_mesh, shard_params, shard_rows
from trace_jax.parallel.rules import param_spec

ROWS = 8
# FP4 weights, whose scales span the sharded stacks; activations that rounding cannot part.
NUMERICS = model.numerics(MOE, PrecisionPolicy((Rule("expert_weight", "nvfp4"),)).resolve(LAYERS))


def test_there_are_eight_devices():
    assert jax.device_count() == 8


@pytest.mark.parametrize(
    "sizes, wanted",
    [
        ({}, (8, 1, 1, 1, 1)),
        ({"expert": 4}, (2, 1, 4, 1, 1)),
        ({"data": 2, "fsdp": 2, "tensor": -1}, (2, 2, 1, 2, 1)),
        ({"data": 1, "expert": 8}, (1, 1, 8, 1, 1)),
        ({"context": 2}, (4, 1, 1, 1, 2)),
    ],
)
def test_a_mesh_has_the_configured_sizes(sizes, wanted):
    mesh = make_mesh(MeshConfig(**sizes))
    assert tuple(mesh.shape.values()) == wanted
    assert tuple(mesh.axis_names) == ("data", "fsdp", "expert", "tensor", "context")


def test_a_mesh_may_span_some_of_the_devices():
    assert make_mesh(MeshConfig(expert=2), jax.devices()[:4]).shape["data"] == 2


def test_sizes_that_do_not_multiply_to_the_devices_are_refused():
    with pytest.raises(ConfigError, match=r"need 6 devices, there are 8; write one axis as -1"):
        make_mesh(MeshConfig(data=2, expert=3))
    with pytest.raises(ConfigError, match=r"8 devices do not divide into 3; write axis sizes"):
        make_mesh(MeshConfig(data=-1, expert=3))


def test_rows_lie_over_the_data_axes_or_the_error_says_what_to_write():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, expert=2))
    rows = shard_rows({"x": jnp.arange(24).reshape(8, 3)}, mesh)["x"]
    assert {s.data.shape for s in rows.addressable_shards} == {(1, 3)}
    np.testing.assert_array_equal(rows, np.arange(24).reshape(8, 3))
    message = r"batch of 6 rows does not divide over data x fsdp x expert = 8 devices; .* of 8"
    with pytest.raises(ConfigError, match=message):
        shard_rows(jnp.zeros((6, 3)), mesh)


def test_expert_weights_are_split_by_expert():
    """BR-149: really split, not merely annotated."""
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    params = shard_params(params_of(MOE), mesh)
    for name, rows in (("gate_up", 2 * MOE.expert_dim), ("down", MOE.hidden)):
        weight = params["layers"]["moe"][name]
        width = params_of(MOE)["layers"]["moe"][name].shape[-1]
        assert {s.data.shape for s in weight.addressable_shards} == {(LAYERS, 1, rows, width)}
        held = {s.device: s.index[1].indices(4)[0] for s in weight.addressable_shards}
        assert sorted(held.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
        np.testing.assert_array_equal(weight, params_of(MOE)["layers"]["moe"][name])
    router = params["layers"]["moe"]["router"]
    assert {s.data.shape for s in router.addressable_shards} == {router.shape}


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"tensor": 8}, {"fsdp": 2, "expert": 2}])
def test_the_contraction_axis_of_an_expert_weight_is_never_cut(sizes):
    """BR-020: no block of a quantized weight lies on two devices."""
    mesh = make_mesh(MeshConfig(**{"data": -1} | sizes))
    for name in ("gate_up", "down"):
        path = tuple(jax.tree_util.DictKey(k) for k in ("layers", "moe", name))
        spec = param_spec(path, (LAYERS, 8, 64, 64), mesh)
        assert spec[3] is None
        assert spec[1:3] == P("expert", "fsdp")[:2]


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"expert": 8}, {"tensor": 8}, {"fsdp": 4}])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_blocks_of_2880_lie_whole_on_a_device(axes, fmt):
    """GPT-OSS's width: 180 blocks of 16 or 90 of 32, which 8 devices could not share evenly."""
    mesh = make_mesh(MeshConfig(**{"data": -1} | axes))
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 8, 2880)), jnp.bfloat16)
    quantize = jax.jit(lambda p: fp4.quantize(p["gate_up"], fp4.FORMATS[fmt], outer_axes=(2, 3)))
    placed = shard_params({"layers": {"moe": {"gate_up": weight}}}, mesh)["layers"]["moe"]
    whole, cut = quantize({"gate_up": weight}), quantize(placed)
    for name in ("packed", "block_scale"):
        got, wanted = getattr(cut, name), getattr(whole, name)
        widths = {s.data.shape[-1] for s in got.addressable_shards}
        assert widths == {wanted.shape[-1]}, "the contraction axis is whole on every device"
        np.testing.assert_array_equal(got, wanted)


def test_optimizer_state_lies_as_its_parameter():
    mesh = make_mesh(MeshConfig(fsdp=8, data=1))
    keys = [jax.tree_util.DictKey(k) for k in ("mu", "layers", "attention", "q", "weight")]
    assert param_spec(keys, (3, 96, 48), mesh) == P(None, "tensor", "fsdp")
    norm = [jax.tree_util.DictKey(k) for k in ("layers", "moe_norm", "weight")]
    assert param_spec(norm, (3, 48), mesh) == P()


@pytest.mark.parametrize(
    "axes, names, shape, message",
    [
        (
            {"fsdp": 8, "data": 1},
            ("layers", "attention", "q", "weight"),
            (3, 96, 44),
            "mesh.fsdp is 8, which does not divide dimension 2 of layers/attention/q/weight "
            "[3, 96, 44], 44; write one of 1, 2, 4, 11, 22, 44, or another model.* size",
        ),
        (
            {"expert": 8, "data": 1},
            ("layers", "moe", "down"),
            (2, 4, 16, 16),
            "mesh.expert is 8, which does not divide dimension 1 of layers/moe/down "
            "[2, 4, 16, 16], 4; write one of 1, 2, 4, or another model.* size",
        ),
        (
            {"tensor": 2},
            ("embed",),
            (259, 32),
            "mesh.tensor is 2, which does not divide dimension 0 of embed [259, 32], 259; write "
            "one of 1, 7, 37, or another model.* size",
        ),
    ],
)
def test_a_size_that_does_not_divide_says_which_and_what_would(axes, names, shape, message):
    """BR-149: never left whole in silence."""
    mesh = make_mesh(MeshConfig(**axes))
    with pytest.raises(ConfigError) as refused:
        param_spec([jax.tree_util.DictKey(k) for k in names], shape, mesh)
    assert str(refused.value) == message


@jax.jit
def value_and_gradients(params, tokens, direction):
    def total(params):
        out = model.apply(MOE, params, tokens, NUMERICS)
        logits = model.logits(params, out.hidden)
        return jnp.sum(logits * direction), logits

    (_, logits), gradients = jax.value_and_grad(total, has_aux=True)(params)
    return logits, gradients


def relative_error(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def inputs():
    tokens = helpers.random_tokens(ROWS, 8, seed=3)
    direction = np.random.default_rng(0).normal(size=(ROWS, 8, MOE.vocab_size))
    return tokens, jnp.asarray(direction, jnp.float32)


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "expert": 4}], ids=str)
def test_logits_and_gradients_do_not_depend_on_the_mesh(sizes):
    wanted_logits, wanted = value_and_gradients(params_of(MOE), *inputs())
    mesh = make_mesh(MeshConfig(**sizes))
    params = shard_params(params_of(MOE), mesh)
    logits, gradients = value_and_gradients(params, *shard_rows(inputs(), mesh))
    assert len(logits.sharding.device_set) == 8
    assert relative_error(logits, wanted_logits) < 0.01
    errors = jax.tree.map(relative_error, gradients, wanted)
    for path, error in jax.tree_util.tree_leaves_with_path(errors):
        assert error < 0.02, jax.tree_util.keystr(path)
