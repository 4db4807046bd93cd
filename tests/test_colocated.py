"""Actor and learner on one mesh: what the rollout left on the devices is read where it lies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import QUICK, tiny

from trace_jax.parallel import rows_sharding, shard_rows
from trace_jax.rl.batches import Batch, merge, split
from trace_jax.trainer import Trainer

COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)
ELEMENT = re.compile(r"\b([a-z]+\d*\w*)\[")


@pytest.fixture(scope="module", params=[0, 20], ids=["one a row", "packed"])
def learner(request, tmp_path_factory):
    """(compiled update on eight devices, its state and rollout as shapes)."""
    rl = {"micro_batches": 2, "prompts_per_step": 16, "pack_length": request.param}
    config = tiny(mesh={"data": 4, "expert": 2}, rl=rl)
    trainer = Trainer(config, tmp_path_factory.mktemp("run"))
    state = trainer.start(trainer.fresh_params())["train"]
    rows = trainer.config.rows
    rollout = trainer.actor.rollout_like(rows)
    by_row = rows_sharding((rows,), 0, trainer.mesh)
    advantages = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=by_row)
    live = jax.ShapeDtypeStruct((rows,), bool, sharding=by_row)
    update = jax.jit(trainer.learner._update, donate_argnums=0, compiler_options=QUICK)
    packing = trainer.learner.packing(np.full(rows, 10))
    if packing is not None:
        packing = shard_rows(packing, trainer.mesh)
    arguments = (state, rollout, advantages, live, None, None, None, packing)
    return update.lower(*arguments).compile(), state, rollout


def test_the_update_takes_the_rollout_as_it_lies(learner):
    """No copy to another layout before the program starts."""
    compiled, _, rollout = learner
    taken = compiled.input_shardings[0][1]
    kept = jax.tree.leaves(taken)
    assert len(kept) > 5
    wanted = {jax.tree_util.keystr(p): a for p, a in jax.tree_util.tree_leaves_with_path(rollout)}
    for path, sharding in jax.tree_util.tree_leaves_with_path(taken):
        like = wanted[jax.tree_util.keystr(path)]
        assert sharding.is_equivalent_to(like.sharding, len(like.shape)), path


def test_no_record_of_the_rollout_crosses_devices(learner):
    """Bits, scales, recorded flags and routes: uint8, bool and int16. Activations may."""
    text = learner[0].as_text()
    moved = [(op, ELEMENT.findall(shape)) for shape, op in COLLECTIVE.findall(text)]
    assert any("f32" in elements for _, elements in moved), "gradients are summed"
    for op, elements in moved:
        assert not {"u8", "pred", "s16"} & set(elements), (op, elements)


@pytest.mark.parametrize("ways, parts", [(1, 2), (4, 2), (2, 1), (2, 4)])
def test_pieces_take_rows_of_every_device_and_come_back_in_order(ways, parts):
    rows = jnp.arange(16)
    fields = dict.fromkeys(Batch._fields) | {"tokens": rows[:, None], "routes": rows[None, :, None]}
    pieces = split(Batch(**fields), parts, ways)
    size = 16 // (ways * parts)
    of_device = np.arange(16).reshape(ways, parts, size)  # a device has 16 / ways rows in a run
    for part in range(parts):
        wanted = of_device[:, part].reshape(-1)
        np.testing.assert_array_equal(pieces.tokens[part, :, 0], wanted)
        np.testing.assert_array_equal(pieces.routes[part, 0, :, 0], wanted)
    np.testing.assert_array_equal(merge(pieces.tokens, ways)[:, 0], rows)


def test_nothing_passes_through_the_host(learner):
    text = learner[0].as_text()
    for word in ("infeed(", "outfeed(", " send(", " recv(", "xla_ffi_python", "xla_python"):
        assert word not in text
    kinds = {s.memory_kind for s in jax.tree.leaves(learner[0].output_shardings)}
    assert len(kinds) == 1


def test_the_state_is_updated_in_its_own_buffers(learner):
    compiled, state, _ = learner
    pairs = re.search(r"input_output_alias=\{(.*?)\}, entry", compiled.as_text())
    aliased = pairs.group(1).count("may-alias") + pairs.group(1).count("must-alias")
    assert aliased == len(jax.tree.leaves(state))
