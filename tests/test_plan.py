"""Plans by arithmetic against hand-made numbers and XLA's; compiling for TPUs; errors."""

import dataclasses
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trace_jax.config import freeze
from trace_jax.planning import compiled, engine, fit, hlo, memory, report, work
from trace_jax.planning.chips import CHIPS, Topology, parse_topology

ROOT = Path(__file__).resolve().parent.parent


def config_of(mesh=(1, 2, 2), **model):
    tree = importlib.import_module("configs.qwen3_30b_a3b").get_config()
    tree.model.update(
        dict(num_layers=2, hidden=256, num_heads=4, num_kv_heads=2, head_dim=64, num_experts=8,
             top_k=2, expert_dim=128, vocab_size=512) | model
    )  # fmt: skip
    tree.rl.update(dict(prompts_per_step=4, samples=2, remat="full"))
    tree.task.update(dict(max_prompt=64, max_response=64))
    tree.mesh.update(dict(zip(("data", "fsdp", "expert"), mesh, strict=True)))
    return freeze(tree)


def test_parameters_are_those_of_hand():
    config = config_of()
    mesh = memory.abstract_mesh(config, 4)
    experts = 2 * 8 * 3 * 256 * 128  # both axes cut these, fsdp alone the rest
    attention = 2 * 256 * (4 * 64 + 2 * 2 * 64 + 4 * 64)
    tables, whole = 2 * 512 * 256, 2 * (2 * 256 + 2 * 64 + 8 * 256) + 256
    want = experts // 4 + (attention + tables) // 2 + whole
    assert memory.param_bytes(config, mesh, 1) == want


def test_bits_that_were_solved_for_are_kept_whatever_is_made_again():
    config = config_of()
    plan = dataclasses.replace(
        config.guidance, layers="all", sites=("expert_in", "k"), checks=0.05, scale_bits=1
    )
    config = dataclasses.replace(config, mode="trace", guidance=plan)
    plain = dataclasses.replace(config, guidance=dataclasses.replace(plan, checks=0.0))
    mesh = memory.abstract_mesh(config, 4)
    more = memory.kept_bytes(config, mesh) - memory.kept_bytes(plain, mesh)
    tokens = 8 * 128 // 4  # a device's
    assert more == 2 * tokens * (256 + 2 * 64) // 8  # two layers: the experts' input, two heads


def shard_bytes(tree):
    return sum(
        int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize
        for a in jax.tree.leaves(tree)
    )


def test_what_is_stored_is_what_the_programs_take():
    config = config_of()
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 2, 1, 1), memory.AXES)
    _, (state, rollout, *_) = compiled.learner_program(config, mesh)
    terms = memory.learner_bytes(config, memory.abstract_mesh(config, 4))
    counters = 4 * 4  # version, bad steps, skipped, Adam's count
    assert shard_bytes(state) == terms["parameters"] + terms["optimizer"] + counters
    assert terms["gradients"] == 2 * terms["parameters"], "a micro-batch's, and the sum of them"
    assert shard_bytes(rollout.guidance.sites) == terms["guidance"]
    by_row = 4 + 4 + 1 + 4  # lengths, finished and version of each of two sequences
    rest = shard_bytes(rollout) - shard_bytes(rollout.guidance.sites)
    assert rest == terms["record"] + 2 * by_row


def test_flops_of_a_token():
    config = config_of()
    active = 2 * (2 * 3 * 256 * 128 + 256 * 768 + 2 * 256 + 2 * 64 + 8 * 256) + 256 + 512 * 256
    assert work.token_flops(config, 10) == 2 * active + 4 * 2 * 4 * 64 * 10


def test_collectives_of_a_loop_by_axis():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    cut = NamedSharding(mesh, P("b"))

    def body(x):
        step = lambda c, _: (jax.lax.psum(c, "b") * 0.5, jax.lax.all_gather(c, "a"))
        return jax.lax.scan(step, x, None, length=3)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P("b"), out_specs=(P("b"), P(None, None, "b")), check_vma=False
    )
    x = jax.ShapeDtypeStruct((32,), jnp.float32, sharding=cut)
    text = jax.jit(mapped).lower(x).compile().as_text()
    found = {(c.kind, c.axes): (c.count, c.bytes) for c in hlo.collectives(text, dict(mesh.shape))}
    assert found[("all-reduce", "b")] == (3, 3 * 32)
    assert found[("all-gather", "a")] == (3, 3 * 64)


@pytest.mark.parametrize(
    "groups, axes",
    (
        ("replica_groups={{0,2},{1,3}}", "a"),
        ("replica_groups=[2,2]<=[2,2]", "b"),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", "a"),
        ("replica_groups=mesh['x'=2,'y'=2] {'y'}", "b"),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", "a"),
        ("source_target_pairs={{0,0},{1,3}}", "a"),
    ),
)
def test_axes_of_groups(groups, axes):
    line = f"  %x = f32[8]{{0}} all-reduce(%y), {groups}, to_apply=%add"
    text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{line}\n}}\n"
    assert hlo.collectives(text, {"a": 2, "b": 2}) == [hlo.Collective("all-reduce", axes, 1, 32)]


def test_the_smallest_change_fits_and_nothing_smaller_was_there():
    config = config_of()
    config = dataclasses.replace(config, rl=dataclasses.replace(config.rl, remat="none"))
    of = lambda memory: Topology("", CHIPS["v6e"]._replace(memory=memory), 4)
    least = fit.most(fit.need(config_of(), of(0)))
    texts, changed = fit.smallest_change(config, of(int(least / fit.FIT) + 1))
    assert texts == ["rl.remat=full"] and changed == config_of()
    assert fit.smallest_change(config, of(1000)) is None
    gpu = Topology("", CHIPS["h200"], 4)
    assert fit.most(fit.need(config_of(), gpu)) > least, "where tiles copy their weights"


def test_an_unknown_topology_is_one_line_that_lists_the_known_ones():
    line = [sys.executable, "-m", "experiments.plan", "--config=configs/qwen3_30b_a3b.py"]
    done = subprocess.run([*line, "--topology=v9:2x2"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "v5e, v5p, v6e, tpu7x, h100, h200, b200" in done.stderr.splitlines()[-1]


def test_what_is_refused_says_what_to_write():
    config = config_of()
    with pytest.raises(ValueError, match="write CHIP:SIZES"):
        parse_topology("h200:0")
    with pytest.raises(ValueError, match="data, fsdp, expert, tensor, context"):
        fit.with_mesh(config, "fsdp=4,model=2")
    with pytest.raises(ValueError, match="need 3 devices, there are 8"):
        memory.abstract_mesh(fit.with_mesh(config, "fsdp=3"), 8)
    eight = fit.with_mesh(config, "fsdp=8")
    assert "write --batch=2 times" in fit.row_refusal(eight, memory.abstract_mesh(eight, 8))


def test_topologies_count_devices():
    assert parse_topology("tpu7x:2x2x1").count == 8
    assert parse_topology("v6e:8x8").count == 64


def test_generation_compiles_ahead_of_time():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: nothing is compiled for TPUs")
    config = config_of()
    done = compiled.compile_programs(config, "v6e:2x2", ("prefill", "decode"))
    kinds = {(c.kind, c.axes) for c in done["decode"].collectives}
    assert ("ragged-all-to-all", "expert") in kinds and ("all-gather", "fsdp") in kinds
    terms = memory.generation_bytes(config, memory.abstract_mesh(config, 4))
    stored = terms["decoded weights"] + terms["KV cache"] + terms["guidance"] + terms["record"]
    assert done["decode"].arguments == pytest.approx(stored, rel=0.25)


def test_the_continuous_engine_plans_by_its_own_arithmetic():
    config = fit.with_mesh(config_of(), "fsdp=4")
    asked = dataclasses.replace(config.rollout, engine="continuous", slots=2)
    config = dataclasses.replace(config, rollout=asked)
    mesh = memory.abstract_mesh(config, 4)
    plan = engine.engine_plan(config, mesh, 10**9)
    state = memory.param_bytes(config, mesh, memory.MASTER + memory.MOMENTS)
    whole = memory.abstract_mesh(config_of((1, 1, 1)), 1)
    weights = memory.rollout_bytes(config, whole, compiled.engine_config(config).precision)
    assert (plan.free, plan.weights) == (10**9 - state - weights, weights)
    more = engine.engine_plan(config, mesh, 10**9 + 10**6)
    assert more.pages == pytest.approx(plan.pages + 0.97e6 / plan.page_bytes, abs=1)
    text, fits = report.engine_line(config, mesh, 3 * 10**6)
    assert not fits and "less than one sequence of 128" in text
    cut = config_of()
    cut = dataclasses.replace(cut, rollout=asked)
    text, fits = report.engine_line(cut, memory.abstract_mesh(cut, 4), 10**9)
    assert not fits and "expert" in text
    assert report.engine_line(config_of(), mesh, 10**9) == (None, True)
