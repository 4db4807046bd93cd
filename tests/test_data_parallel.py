"""Continuous engines side by side on the devices of a mesh."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_continuous import assert_same_rollout

from trace_jax.config import MeshConfig
from trace_jax.parallel import make_mesh, rows_sharding
from trace_jax.rollout import make_engine
from trace_jax.rollout.data_parallel import DataParallelBatches
from trace_jax.rollout.record import map_rows

CONFIG = helpers.engine(audit_rows=0).config


def mesh_of(count: int, **axes):
    sizes = dict(data=1, fsdp=1, expert=1, tensor=1) | axes
    return make_mesh(MeshConfig(**sizes), jax.devices()[:count])


def params():
    return helpers.rollout_params_of(helpers.MOE, "nvfp4")


def test_three_devices_give_the_batch_engines_rollout_in_the_learners_layout():
    mesh = mesh_of(3, fsdp=3)
    config = dataclasses.replace(CONFIG, audit_rows=1)
    run = make_engine("continuous", config, mesh=mesh, slots=6)
    mine = run(params(), *helpers.prompts(), helpers.keys(), version=3)
    assert_same_rollout(mine.replace(audit={}), helpers.rollout().replace(audit={}))
    assert mine.audit["expert_in"].codes.shape[1] == 1

    def check(a, axis):
        assert a.sharding == rows_sharding(a.shape, axis, mesh)
        return a

    map_rows(check, mine)
    assert [len(engine._engine.scheduler.slots) for engine in run.engines] == [2, 2, 2]
    owners = [engine._engine._pools[0].pages["k"].data.devices() for engine in run.engines]
    assert owners == [{device} for device in mesh.devices.flat]


def test_turns_go_on_on_their_own_device():
    config = dataclasses.replace(CONFIG, samples=1, eos_ids=(helpers.VOCAB,))
    run = DataParallelBatches(config, mesh_of(2, data=2), turns=True)
    rows, weights = [[1, 2, 3], [4, 5, 6, 7, 8]], params()
    for turn in range(2):
        lengths = np.array([len(row) for row in rows], np.int32)
        tokens = np.zeros((2, 24), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        made = run(weights, tokens, lengths, helpers.keys()[:2], version=3, turn=turn)
        if turn == 0:
            prefilled = [engine._engine.counts.prefilled for engine in run.engines]
        for i in range(2):
            rows[i] = [*np.asarray(made.tokens)[i, : int(made.length[i])].tolist(), 9]
    assert [engine._engine.counts.prefilled for engine in run.engines] == prefilled == [2, 4]
    plain = make_engine("batch", config)
    for i in range(2):
        one = jnp.asarray(tokens[i : i + 1]), jnp.asarray(lengths[i : i + 1])
        alone = plain(weights, *one, helpers.keys()[i : i + 1], version=3)
        np.testing.assert_array_equal(alone.tokens[0], made.tokens[i])


def test_what_does_not_divide_or_cuts_more_than_rows_is_refused():
    with pytest.raises(ValueError, match="3 prompts do not divide among 2 devices"):
        run = DataParallelBatches(CONFIG, mesh_of(2, data=2))
        run(params(), *helpers.prompts(), helpers.keys())
    with pytest.raises(ValueError, match="expert.: 2.*write 1 for these"):
        DataParallelBatches(CONFIG, mesh_of(2, expert=2))
