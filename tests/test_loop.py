"""The loop end to end on a tiny model: metrics, resume, interruption, modes, learning.

Engines and learners are pure functions of their settings and take nearly all of the
time to compile, so runs of equal settings share them here. The reward is synthetic
(the share of low token ids): a task that a fresh model solves now and then.
"""

import dataclasses
import json
import os
import shutil
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import STEPS, low_tokens, rows_of, share_compiled, shared_learner, tiny

from trace_jax import config as settings
from trace_jax import loop, modes
from trace_jax.checkpoint import CheckpointError
from trace_jax.config import Config, ConfigError, freeze
from trace_jax.interrupt import Interrupt
from trace_jax.loop import TrainingStopped, train
from trace_jax.metrics import read_metrics
from trace_jax.parallel import make_mesh
from trace_jax.tasks import batch_indices
from trace_jax.trainer import Trainer

SITES = ("k", "v", "expert_in", "expert_mid")


@pytest.fixture(scope="module", autouse=True)
def shared():
    with pytest.MonkeyPatch.context() as patch:
        share_compiled(patch)
        patch.setattr("trace_jax.actor.score", low_tokens)
        yield


class Seen:
    """What a run read and printed."""

    def __init__(self, patch):
        self.prompts, real = [], Trainer.iteration

        def iteration(trainer, step, state):
            prompts = trainer.actor.prompts(step)
            self.prompts.append((step, [p.prompt for p in prompts.problems]))
            self.during(step)
            return real(trainer, step, state)

        patch.setattr(Trainer, "iteration", iteration)

    def during(self, step):
        """Replaced by tests that interrupt a step."""


@pytest.fixture
def seen(monkeypatch):
    return Seen(monkeypatch)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, shared):
    """An uninterrupted run: (folder, result, prompts by step)."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen(patch)
        result = train(tiny(), folder)
    return folder, result, seen.prompts


def assert_same_run(straight, folder, result, prompts):
    """2N steps equal N + restore + N: parameters, metrics and data, bit for bit."""
    first_folder, first, first_prompts = straight
    assert prompts == first_prompts
    assert rows_of(folder) == rows_of(first_folder)
    for a, b in zip(*map(jax.tree.leaves, (first.params, result.params)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (result.before, result.after) == (first.before, first.after)


# --- a run ---------------------------------------------------------------------------


def test_metrics_hold_the_whole_ledger_of_every_step(straight):
    rows = read_metrics(straight[0])
    assert [row["step"] for row in rows] == list(range(STEPS))
    wanted = {
        "reward/mean",
        "mismatch/gap_mean",
        "mismatch/gap_p99",
        "mismatch/gap_max",
        "mismatch/k3",
        "mismatch/kl_k1",
        "mismatch/chi2",
        "mismatch/ess_share",
        "mismatch/gap_q1",
        "mismatch/gap_q4",
        "mismatch/gap_positive",
        "mismatch/gap_negative",
        "agreement/mean",
        "routes/agreement/layer0",
        "rollout/unscored",
        "rollout/dropped_prompts",
        "rollout/finished",
        "rollout/response_length",
        "guidance/bytes_per_token",
        "weights/bytes",
        "tokens_per_second",
        "train/loss",
        "train/grad_norm",
        "train/clip_fraction",
        "train/skipped",
    }
    wanted |= {f"agreement/{site}/layer{i}" for site in SITES for i in range(2)}
    wanted |= {
        f"seconds/{part}" for part in ("sync", "prompts", "rollout", "reward", "ledger", "train")
    }
    for row in rows:
        assert wanted <= set(row), wanted - set(row)
        assert row["nonfinite_metrics"] == 0
        assert row["train/grad_norm"] > 0 and row["train/clip_fraction"] == 0
        assert 0 <= row["mismatch/gap_mean"] < 0.05, "two paths of one code base differ little"
        assert row["agreement/mean"] > 0.99
    # A block of 16 has 16 bits and a scale byte: k and v 3 bytes each, the input of 32 six.
    assert {row["guidance/bytes_per_token"] for row in rows} == {2 * (3 + 3 + 6)}


def test_run_folder_holds_config_metrics_checkpoints_and_the_audit(straight):
    folder, result, _ = straight
    assert freeze(json.loads((folder / "config.json").read_text())) == tiny()
    kept = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert kept == ["2", "4"] and result.checkpoint == (folder / "checkpoints" / "4").resolve()
    assert (folder / "versions.json").exists() and (folder / "audit" / str(STEPS)).is_dir()
    assert result.last == read_metrics(folder)[-1]
    assert set(result.before) == {"accuracy", "accuracy/chain_sum"}
    assert result.own is result.after, "trace is judged in the formats of its own rollout"


# --- resume --------------------------------------------------------------------------


def test_interrupted_run_goes_on_as_if_nothing_had_happened(straight, tmp_path, seen, capsys):
    """Ctrl-C finishes the step, saves and says how to resume; BR-136: each batch once."""
    folder, handler = tmp_path / "run", signal.getsignal(signal.SIGINT)
    seen.during = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 0 else None
    with pytest.raises(TrainingStopped) as stopped:
        train(tiny(), folder)
    assert "stopped at step 1; saved" in str(stopped.value)
    assert f"--resume --workdir={folder}" in str(stopped.value)
    assert "Ctrl-C again stops at once" in capsys.readouterr().err
    assert (folder / "checkpoints" / "1").is_dir() and len(read_metrics(folder)) == 1
    assert signal.getsignal(signal.SIGINT) is handler
    result = train(tiny(), folder, resume=True)
    assert_same_run(straight, folder, result, seen.prompts)


def test_interrupted_warm_start_goes_on(straight, tmp_path, seen, monkeypatch):
    folder, real, calls = tmp_path / "run", loop.encode_examples, []

    def encode(*arguments):
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(loop, "encode_examples", encode)
    with pytest.raises(TrainingStopped, match=r"stopped at warm start, step 1; saved"):
        train(tiny(), folder)
    result = train(tiny(), folder, resume=True)
    assert len(calls) == 3, "three steps, none of them twice"
    assert_same_run(straight, folder, result, seen.prompts)


def test_a_finished_run_is_extended_and_reports_its_last_row(straight, tmp_path, seen):
    """rl.steps may change on a resume; a resume with nothing to do repeats the result."""
    folder = tmp_path / "run"
    train(tiny(rl={"steps": 2}), folder)
    result = train(tiny(), folder, resume=True)
    assert_same_run(straight, folder, result, seen.prompts)
    again = train(tiny(), folder, resume=True)
    assert again.last == result.last == read_metrics(folder)[-1]
    assert len(seen.prompts) == STEPS, "no step ran again"
    with pytest.raises(ConfigError, match=r"^rl\.steps is 3 and the run is at step 4 already"):
        train(tiny(rl={"steps": 3}), folder, resume=True)
    assert json.loads((folder / "config.json").read_text())["rl"]["steps"] == STEPS


def test_second_ctrl_c_stops_at_once():
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_another_config_lists_what_differs(straight):
    other = tiny(optim={"learning_rate": 0.02}, guidance={"bits": 4})
    with pytest.raises(ValueError) as refused:
        train(other, straight[0], resume=True)
    assert "optim.learning_rate: 0.01 -> 0.02" in str(refused.value)
    assert "guidance.bits: 1 -> 4" in str(refused.value)
    assert str(refused.value).count("->") == 2


def test_a_folder_in_use_is_refused_without_resume(straight):
    with pytest.raises(ValueError, match="is not empty: write --resume to go on"):
        train(tiny(), straight[0])


def flip(folder) -> None:
    """Damages the largest file of a checkpoint."""
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


@pytest.mark.parametrize("damaged", [("4",), ("2", "4")])
def test_a_damaged_checkpoint_is_refused_in_one_line(straight, tmp_path, damaged):
    """BR-132: never an older step, nor a fresh start, in silence."""
    folder = shutil.copytree(straight[0], tmp_path / "run")
    for step in damaged:
        flip(folder / "checkpoints" / step)
    with pytest.raises(CheckpointError) as refused:
        train(tiny(), folder, resume=True)
    message = str(refused.value)
    assert "\n" not in message and "checkpoints/4 is damaged" in message
    assert ("whole ones: 2" if len(damaged) == 1 else "whole ones: none") in message
    assert len(read_metrics(folder)) == STEPS


# --- refusals before anything is written ------------------------------------------------


@pytest.mark.parametrize(
    "groups, key",
    [
        ({"rl": {"prompts_per_step": 12}}, "rl.prompts_per_step is 12"),
        ({"rl": {"micro_batches": 2}}, "rl.prompts_per_step is 8"),
        ({"eval": {"problems": 9}}, "eval.problems is 9"),
        ({"warmup": {"batch_size": 4}}, "warmup.batch_size is 4"),
    ],
)
def test_batches_that_do_not_divide_the_mesh_are_refused_first(monkeypatch, tmp_path, groups, key):
    monkeypatch.setattr("trace_jax.trainer.make_mesh", make_mesh)  # all eight devices
    with pytest.raises(ConfigError) as refused:
        train(tiny(**groups), tmp_path / "run")
    message = str(refused.value)
    assert message.startswith(f"{key}; write a multiple of the ") and "8 devices" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "groups, error, text",
    [
        ({"task": {"max_prompt": 2}}, ConfigError, "task.max_prompt is 2: all 8 prompts"),
        ({"task": {"datasets": (("gcdd", 1.0, ()),)}}, ValueError, "did you mean gcd"),
        ({"warmup": {"init_from": "nowhere"}}, CheckpointError, "nowhere/warmup has no checkpoint"),
        ({"mesh": {"data": 3}}, ConfigError, "there are 1; write one axis as -1"),
    ],
)
def test_what_cannot_run_leaves_no_folder(tmp_path, monkeypatch, groups, error, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as refused:
        train(tiny(**groups), tmp_path / "run")
    assert text in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_warm_start_of_another_run_is_taken_over(straight, tmp_path):
    other = tiny(warmup={"init_from": str(straight[0])})
    taken = loop.warm_start(Trainer(other, tmp_path / "run"))
    own = loop.warm_start(Trainer(tiny(), straight[0]))
    fresh = Trainer(tiny(), tmp_path / "run").fresh_params()
    for a, b in zip(*map(jax.tree.leaves, (taken, own)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(np.asarray(taken["embed"]) - np.asarray(fresh["embed"])).max() > 0


# --- seeds ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampler(straight):
    """(prompts, rollout) of one step of a configuration, all from the same parameters."""
    params = straight[1].params

    def sample(**seeds):
        config = dataclasses.replace(tiny(), **seeds)
        actor = Trainer(config, straight[0]).actor
        prompts = actor.prompts(0)
        return prompts, actor.generate(actor.sync(params), prompts, 0, jnp.int32(0))

    return sample


def test_data_seed_changes_the_order_of_prompts_alone(sampler):
    """BR-145: another data_seed visits the same problems in another order."""
    prompts, _ = sampler()
    other, _ = sampler(data_seed=1)
    texts = lambda p: [x.prompt for x in p.problems]
    assert texts(prompts) != texts(other)
    order = lambda seed: batch_indices(0, 4096, seed)
    assert order(0) != order(1) and sorted(order(0)) == sorted(order(1))
    assert texts(sampler()[0]) == texts(prompts)


def test_seed_changes_samples_alone(sampler):
    """BR-145: another seed reaches the sampler and leaves the prompts."""
    prompts, rollout = sampler()
    same, other = sampler()[1], sampler(seed=1)
    np.testing.assert_array_equal(same.tokens, rollout.tokens)
    np.testing.assert_array_equal(other[0].tokens, prompts.tokens)
    drawn = np.asarray(rollout.mask) & np.asarray(other[1].mask)
    assert np.mean((np.asarray(rollout.tokens) != np.asarray(other[1].tokens))[drawn]) > 0.5


def test_data_seed_does_not_touch_the_samples_of_a_prompt(sampler, monkeypatch):
    _, rollout = sampler()
    first = lambda problems, step, count, seed: [problems.problem(i) for i in range(count)]
    monkeypatch.setattr("trace_jax.actor.choose", first)
    np.testing.assert_array_equal(sampler(data_seed=5)[1].tokens, sampler()[1].tokens)
    assert rollout.tokens.shape == (32, 16)


def test_the_largest_seed_works(sampler):
    """Its noise seed would not fit 32 bits without care."""
    assert np.isfinite(np.asarray(sampler(seed=2**31 - 1)[1].logp)).all()


# --- one iteration ---------------------------------------------------------------------


def begin(config: Config, folder) -> tuple[Trainer, dict]:
    trainer = Trainer(config, folder)
    return trainer, trainer.start(trainer.fresh_params())


def test_outages_and_dropped_prompts_are_counted_apart(tmp_path, monkeypatch):
    """BR-129, BR-158: neither is a reward of 0."""
    trainer, state = begin(tiny(), tmp_path)
    real = trainer.actor.prompts

    def shortened(step):
        prompts = real(step)
        return dataclasses.replace(prompts, live=np.arange(8) < 6)

    def outage(*arguments):
        rewards, valid = low_tokens(*arguments)
        valid = valid.copy()
        valid[0, 0] = valid[3, 2] = valid[3, 3] = False
        return rewards, valid

    monkeypatch.setattr(trainer.actor, "prompts", shortened)
    monkeypatch.setattr("trace_jax.actor.score", outage)
    _, metrics = trainer.iteration(0, state)
    assert metrics["rollout/dropped_prompts"] == 2 and metrics["rollout/unscored"] == 3
    assert metrics["reward/dropped"] == 2 * 4 + 3
    assert metrics["mismatch/tokens"] < metrics["rollout/response_length"] * 32
    assert np.isfinite(metrics["train/loss"])


def test_too_many_non_finite_steps_stop_the_run(tmp_path, monkeypatch):
    """The limit is on steps in a row; the message says what to do."""
    config = tiny(optim={"max_bad_steps": 2})
    learner = shared_learner(tiny(), modes.resolve(tiny()))
    monkeypatch.setattr("trace_jax.trainer.Learner", lambda *_: learner)
    spoiled = lambda *a: (low_tokens(*a)[0] * np.nan, low_tokens(*a)[1])
    monkeypatch.setattr("trace_jax.actor.score", spoiled)
    trainer, state = begin(config, tmp_path)
    before = jax.device_get(state["train"].params)
    trainer.save(0, state, {})
    state, metrics = trainer.iteration(0, state)
    assert metrics["train/skipped"] == 1 and metrics["train/bad_steps"] == 1
    for a, b in zip(*map(jax.tree.leaves, (before, state["train"].params)), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(TrainingStopped) as stopped:
        trainer.iteration(1, state)
    assert str(stopped.value) == (
        "2 optimizer steps in a row were not finite, up to step 1; the newest checkpoint is of "
        "step 0. Write a smaller optim.learning_rate and another --workdir"
    )


def test_only_what_the_update_needs_is_scored_beforehand():
    asked = []
    learner = SimpleNamespace(score=lambda params, *_: asked.append(params) or params)
    state = {"reference": "reference"}
    policy = SimpleNamespace(params="policy", version=0)

    def fixed(**rl):
        trainer = SimpleNamespace(config=tiny(rl=rl), learner=learner)
        return Trainer._fixed_logprobs(trainer, policy, state, None, None)

    assert fixed() == (None, None)
    assert fixed(minibatches=2) == ("policy", None)
    assert fixed(minibatches=2, old_logprobs="rollout") == (None, None)
    assert fixed(kl_coef=0.1) == (None, "reference")
    assert asked == ["policy", "reference"]


def test_packing_moves_no_metric_and_says_what_it_saves(tmp_path):
    """The same rollout, packed: every token is kept, and the padding before and after is told."""
    plain, packed = (begin(tiny(rl=rl), tmp_path) for rl in ({}, {"pack_length": 40}))
    wanted = plain[0].iteration(0, plain[1])[1]
    metrics = packed[0].iteration(0, packed[1])[1]
    counts = {k: v for k, v in metrics.items() if k.startswith("packing/")}
    rollout = packed[0].actor.rollout_like(32)
    before, after = counts["packing/padding_before"], counts["packing/padding_after"]
    assert counts["packing/tokens"] == pytest.approx((1 - before) * rollout.tokens.size)
    assert counts["packing/tokens"] == pytest.approx((1 - after) * counts["packing/rows"] * 40)
    assert after < before
    assert set(metrics) - set(wanted) == set(counts)
    for name in ("train/loss", "train/grad_norm", "mismatch/gap_mean", "mismatch/tokens"):
        assert metrics[name] == pytest.approx(wanted[name], rel=0.02, abs=1e-4), name


@pytest.mark.parametrize("mode", settings.MODES)
def test_each_mode_runs_two_steps_of_the_same_config(tmp_path, mode):
    trainer, state = begin(dataclasses.replace(tiny(), mode=mode), tmp_path)
    for step in range(2):
        state, metrics = trainer.iteration(step, state)
    assert int(state["train"].version) == 2 and metrics["train/grad_norm"] > 0
    assert all(np.isfinite(value) for value in metrics.values())
    quantized = {k.split("/")[1] for k in metrics if k.startswith("agreement/") and "layer" in k}
    expected = {"qat": set(SITES), "trace": set(SITES), "w4a16": {"k", "v"}, "quads": {"k", "v"}}
    assert quantized == expected.get(mode, set())
    assert (metrics["guidance/bytes_per_token"] > 0) == (mode == "trace")
    # BF16 on both sides is the same computation; FP4 against BF16 is not.
    limit = {"naive": (0.005, 1.0), "quads": (0.001, 0.02)}.get(mode, (0.0, 0.005))
    assert limit[0] <= metrics["mismatch/gap_mean"] < limit[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["trace", "bf16"])
def test_rl_learns_a_trivial_task(tmp_path, mode):
    """FP4 on both sides and guidance learn what BF16 learns."""
    trainer, state = begin(dataclasses.replace(tiny(), mode=mode), tmp_path)
    rewards = []
    for step in range(40):
        state, metrics = trainer.iteration(step, state)
        rewards.append(metrics["reward/mean"])
    assert rewards[0] < 0.4, "a fresh model draws a low token one time in four"
    assert np.mean(rewards[-5:]) > 0.9
