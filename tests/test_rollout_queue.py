"""Generation ahead of the learner: versions, order of dispatch, resume, the ledger by lag."""

import dataclasses
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import low_tokens, rows_of, share_compiled, tiny

from trace_jax.actor import Actor
from trace_jax.clock import Clock
from trace_jax.config import ConfigError
from trace_jax.draws import Draw
from trace_jax.loop import TrainingStopped, train
from trace_jax.metrics import read_metrics
from trace_jax.rl.advantages import group_advantages
from trace_jax.rl.mismatch import logprob_ledger
from trace_jax.rl.staleness import BY_LAG, ledger_by_lag
from trace_jax.rollout_queue import Launched, QueueError, RolloutQueue, check_groups
from trace_jax.trainer import Trainer

LAG, STEPS = 2, 5


def lagging(**groups):
    rl = {"max_version_lag": LAG, "steps": STEPS} | groups.pop("rl", {})
    # Saves judge what waits, so none may fall into a run whose order is looked at.
    return tiny(rl=rl, checkpoint={"every": 10}, **groups)


@pytest.fixture(scope="module", autouse=True)
def shared():
    with pytest.MonkeyPatch.context() as patch:
        share_compiled(patch)
        patch.setattr("trace_jax.actor.score", low_tokens)
        yield


def watched(patch) -> list[tuple]:
    """(what, step, version of the weights) in the order in which a run dispatches its parts."""
    events, real = [], (Actor.launch, Actor.judge, Trainer.iteration)

    def launch(actor, params, step, version, clock):
        events.append(("launch", step, version))
        return real[0](actor, params, step, version, clock)

    def judge(actor, launched, clock):
        events.append(("judge", launched.step, launched.version))
        return real[1](actor, launched, clock)

    def iteration(trainer, step, state):
        state, metrics = real[2](trainer, step, state)
        events.append(("updated", step, int(state["train"].version)))
        return state, metrics

    patch.setattr(Actor, "launch", launch)
    patch.setattr(Actor, "judge", judge)
    patch.setattr(Trainer, "iteration", iteration)
    return events


@pytest.fixture(scope="module")
def straight(tmp_path_factory, shared):
    """An uninterrupted run with a lag: (folder, result, events)."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        events = watched(patch)
        result = train(lagging(), folder)
    return folder, result, events


def assert_same_run(straight, folder, result):
    assert rows_of(folder) == rows_of(straight[0])
    for a, b in zip(*map(jax.tree.leaves, (straight[1].params, result.params)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert result.after == straight[1].after


def test_a_rollout_is_of_weights_that_are_the_lag_old(straight):
    launched = {step: version for what, step, version in straight[2] if what == "launch"}
    assert launched == {step: max(step - LAG, 0) for step in range(STEPS + LAG)}
    assert [row["rollout/lag"] for row in read_metrics(straight[0])] == [0, 1, 2, 2, 2]


def test_generation_is_dispatched_before_older_rollouts_are_judged_and_learned_from(straight):
    """The device draws step s + lag while the host judges step s."""
    order = [(what, step) for what, step, _ in straight[2]]
    for step in range(STEPS):
        ahead, judged = order.index(("launch", step + LAG)), order.index(("judge", step))
        assert ahead < judged < order.index(("updated", step))


def test_a_lag_changes_the_run(straight, tmp_path):
    """Else the tests above would hold for a queue that nobody reads."""
    result = train(tiny(rl={"steps": STEPS}), tmp_path / "run")
    pairs = zip(*map(jax.tree.leaves, (straight[1].params, result.params)), strict=True)
    assert any(np.any(np.asarray(a) != np.asarray(b)) for a, b in pairs)
    on_policy, late = read_metrics(tmp_path / "run"), read_metrics(straight[0])
    assert on_policy[0]["reward/mean"] == late[0]["reward/mean"], "the same weights at first"
    assert not any(key.startswith("mismatch/lag") for row in on_policy for key in row)
    assert {row["rollout/lag"] for row in on_policy} == {0}
    gaps = [rows[-1]["mismatch/gap_mean"] for rows in (on_policy, late)]
    assert gaps[1] > 2 * gaps[0], "older weights are farther from the trainer's"


def test_a_resumed_run_takes_its_queue_along(straight, tmp_path, monkeypatch):
    """Bit for bit, from a checkpoint in which two rollouts wait."""
    folder, events = tmp_path / "run", watched(monkeypatch)
    seen, real = [], group_advantages

    def advantages(*args, **kwargs):
        seen.append(1)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr("trace_jax.trainer.group_advantages", advantages)
    with pytest.raises(TrainingStopped, match="stopped at step 3; saved"):
        train(lagging(), folder)
    drawn = len(events)
    result = train(lagging(), folder, resume=True)
    launched = [step for what, step, _ in events[drawn:] if what == "launch"]
    assert launched == [5, 6], "3 and 4 came with the checkpoint"
    assert_same_run(straight, folder, result)


def test_an_extended_run_is_the_longer_run(straight, tmp_path):
    folder = tmp_path / "run"
    train(lagging(rl={"steps": 3}), folder)
    assert_same_run(straight, folder, train(lagging(), folder, resume=True))


def test_the_ledger_splits_by_lag(straight):
    for row in read_metrics(straight[0]):
        lag = min(row["step"], LAG)
        names = {k.split("/")[1] for k in row if k.startswith("mismatch/lag")}
        assert names == {f"lag{lag}"}, "one version drew every row of this run"
        for name in ("gap_mean", "tokens"):
            assert row[f"mismatch/lag{lag}/{name}"] == row[f"mismatch/{name}"]
        if lag:
            assert row[f"agreement/lag{lag}"] == row["agreement/mean"]


def test_the_ledger_of_a_lag_is_that_of_its_rows():
    rng = np.random.default_rng(0)
    ours, theirs = (jnp.asarray(rng.normal(size=(4, 3)), jnp.float32) for _ in range(2))
    mask, advantages = jnp.ones((4, 3), bool), jnp.ones(4)
    lag = jnp.array([0, 2, 2, 1])
    split = ledger_by_lag(ours, theirs, mask, advantages, lag, 3)
    for k in range(4):
        rows = np.asarray(lag) == k
        if rows.any():
            alone = logprob_ledger(ours[rows], theirs[rows], mask[rows], advantages[rows])
            for name in BY_LAG:
                np.testing.assert_allclose(split[f"lag{k}/{name}"], alone[name], rtol=1e-6)
    assert split["lag3/tokens"] == 0 and split["lag0/tokens"] == 3 and split["lag2/tokens"] == 6


# --- what must never be mixed ----------------------------------------------------------


def play(folder):
    """(trainer, a launched rollout of fresh parameters)."""
    trainer = Trainer(lagging(), folder)
    params = trainer.actor.sync(trainer.fresh_params())
    return trainer, trainer.actor.launch(params, 0, 0, Clock())


@pytest.fixture(scope="module")
def launched(straight):
    return play(straight[0])[1]


def test_a_true_group_passes(launched):
    check_groups(launched.played.rollout, launched.prompts, 4, 0)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda r: r.replace(tokens=r.tokens.at[5, 2].add(1)), "row 5, group 1: another prompt"),
        (lambda r: r.replace(tokens=jnp.roll(r.tokens, 1, 0)), "group [0-7]: another prompt"),
        (
            lambda r: r.replace(prompt_length=r.prompt_length.at[7].add(-1)),
            "row 7, group 1: another prompt",
        ),
        (
            lambda r: r.replace(guidance=r.guidance.replace(version=r.version.at[9].set(1))),
            r"row 9, group 2: another policy version than its step's \(version 0\)",
        ),
    ],
)
def test_mixed_groups_are_refused(launched, change, message):
    with pytest.raises(QueueError, match=message):
        check_groups(change(launched.played.rollout), launched.prompts, 4, 0)


def test_the_queue_gives_out_the_step_that_is_due_or_nothing():
    queue = RolloutQueue(1)
    queue.fill(4, lambda step: Launched(step, queue.version_of(step), None, None, None))
    assert len(queue) == 2
    with pytest.raises(QueueError, match="step 4 of version 3 where step 5 of version 4 is due"):
        queue.take(5, lambda launched: launched)
    assert queue.take(5, lambda launched: launched.step) == 5
    queue.fill(6, lambda step: Launched(step, 0, None, None, None))
    with pytest.raises(QueueError, match="step 6 of version 0 where step 6 of version 5 is due"):
        queue.take(6, lambda launched: launched)


def test_a_checkpoint_whose_queue_is_of_other_prompts_is_refused(straight, tmp_path):
    """No wrong state is accepted: another data_seed, here behind the configuration's back."""
    trainer = Trainer(lagging(), straight[0])
    trainer.actor.config = dataclasses.replace(trainer.config, data_seed=1)
    with pytest.raises(QueueError, match="another prompt than its step's"):
        trainer.restore(trainer.start(trainer.fresh_params()))


def test_groups_beyond_the_lag_are_dropped_and_counted(straight, tmp_path):
    """Two of eight groups are of weights three versions old, where two are allowed."""
    trainer, launched = play(tmp_path)
    state = trainer.start(trainer.fresh_params())
    state["train"] = state["train"].replace(version=state["train"].version + LAG)
    drawn = trainer.actor.judge(launched, Clock())

    def older(rollout):
        version = np.zeros(32, np.int32)
        version[8:16] = -1
        return rollout.replace(guidance=rollout.guidance.replace(version=version))

    def learn(draw: Draw):
        trainer.queue.load([draw] * LAG)
        return trainer.iteration(LAG, jax.tree.map(jnp.copy, state))[1]

    whole = learn(drawn)
    metrics = learn(drawn._replace(rollout=older(drawn.rollout)))
    assert (whole["rollout/stale_groups"], metrics["rollout/stale_groups"]) == (0, 2)
    lost = int(np.asarray(drawn.rollout.mask)[8:16].sum())
    assert whole["mismatch/tokens"] - metrics["mismatch/tokens"] == lost > 0
    assert metrics["mismatch/lag2/tokens"] == metrics["mismatch/tokens"]


def test_what_a_stale_rollout_cannot_give_is_refused():
    with pytest.raises(ConfigError, match="rl.score_centering is 4 with rl.max_version_lag 1"):
        tiny(rl={"max_version_lag": 1, "score_centering": 4})
    with pytest.raises(ConfigError, match="rl.max_version_lag is -1; write 0 or more"):
        tiny(rl={"max_version_lag": -1})
