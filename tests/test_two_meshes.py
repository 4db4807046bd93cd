"""Some devices generate, the others learn."""

import jax
import numpy as np
import pytest
from run_helpers import low_tokens, rows_of, share_compiled, tiny

from trace_jax import trainer
from trace_jax.actor import Actor
from trace_jax.config import ConfigError, MeshConfig
from trace_jax.loop import train
from trace_jax.metrics import read_metrics
from trace_jax.parallel import split_meshes

ONE = MeshConfig(data=1, fsdp=1, expert=1, tensor=1)
RL = {"steps": 3, "max_version_lag": 1}
REST = {"rl": RL, "checkpoint": {"every": 10}}  # a save judges what waits, on no clock
NEW = ("rollout/transfer_bytes",)


@pytest.fixture(scope="module", autouse=True)
def shared():
    with pytest.MonkeyPatch.context() as patch:
        share_compiled(patch)
        patch.setattr("trace_jax.actor.score", low_tokens)
        split = lambda config, count: split_meshes(config, count, jax.devices()[: 1 + count])
        patch.setattr(trainer, "split_meshes", split)
        yield


def test_a_run_on_two_meshes_is_the_run_on_one(tmp_path, monkeypatch):
    launched, real = [], Actor.launch

    def launch(*arguments):
        launched.append(real(*arguments))
        return launched[-1]

    monkeypatch.setattr(Actor, "launch", launch)
    apart = train(tiny(rollout={"devices": 1}, **REST), tmp_path / "apart")
    (first, second), records = jax.devices()[:2], launched[:]
    for one in records:
        assert {d for a in jax.tree.leaves(one.made) for d in a.devices()} == {second}
        assert {d for a in jax.tree.leaves(one.played.rollout) for d in a.devices()} == {first}
    together = train(tiny(**REST), tmp_path / "together")
    for a, b in zip(*map(jax.tree.leaves, (apart.params, together.params)), strict=True):
        np.testing.assert_array_equal(a, b)
    plain = [{k: v for k, v in row.items() if k not in NEW} for row in rows_of(tmp_path / "apart")]
    assert plain == rows_of(tmp_path / "together")
    for row in read_metrics(tmp_path / "apart"):
        nbytes = sum(a.nbytes for a in jax.tree.leaves(records[0].made))
        assert row["rollout/transfer_bytes"] == nbytes
        assert row["seconds/transfer"] >= 0


def test_weights_cross_once_a_sync(tmp_path):
    made = trainer.Trainer(tiny(rollout={"devices": 2}, **REST), tmp_path)
    actor, params = made.actor, made.actor.sync(made.initial_params())
    taken = actor.take(params)
    assert actor.take(params) is taken
    devices = {d for a in jax.tree.leaves(taken) for d in a.devices()}
    assert devices == set(jax.devices()[1:3])
    assert actor.take(actor.sync(made.initial_params())) is not taken


def test_what_cannot_be_split_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="rollout.devices is 2, and there are 2.*at most 1"):
        split_meshes(ONE, 2, jax.devices()[:2])
    with pytest.raises(ConfigError, match="need 1 devices, there are 2"):
        split_meshes(ONE, 1, jax.devices()[:3])
    with pytest.raises(ConfigError, match="a multiple of the 3 devices that generate"):
        trainer.Trainer(tiny(rollout={"devices": 3}), tmp_path)
