"""Episodes on a real engine: transcripts, masks and the whole record line up by token."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SHAPE
from run_helpers import QUICK, rows_of, share_compiled, shared_engine, tiny

from trace_jax import loop, model, scoring, sync
from trace_jax.config import Config, ConfigError, default, freeze
from trace_jax.draws import MAX_DRAWS
from trace_jax.model import NOT_RECORDED
from trace_jax.modes import resolve
from trace_jax.parallel import make_mesh
from trace_jax.play import Player, engine_shape, episode_counts, play_episodes
from trace_jax.rl.learner import Learner
from trace_jax.rollout import EngineConfig
from trace_jax.rollout.sampling import request_keys
from trace_jax.tasks import ByteTokenizer, EpisodeProblem, Step
from trace_jax.tasks.multiturn import TranscriptError
from trace_jax.warmup import encode_examples


class Terse(ByteTokenizer):
    """One id in five ends a turn, so that a random model ends some in time."""

    eos_ids = (258, *range(0, 256, 5))


TOK = Terse()
PROMPTS, SAMPLES = 3, 2
ROWS = PROMPTS * SAMPLES


@cache
def config() -> Config:
    c = default(**SHAPE | {"num_layers": 2})
    c.task.kind, c.task.params = "key_maze", (("width", 2), ("height", 2), ("keys", 0))
    c.task.max_prompt, c.task.max_response = 16, 40
    c.task.turns, c.task.turn_tokens, c.task.observation_tokens = 3, 5, 10
    c.guidance.layers, c.guidance.bits = "all", 4
    c.guidance.sites = ("expert_in", "expert_mid", "k", "v")
    c.rl.prompts_per_step, c.rl.samples = PROMPTS, SAMPLES
    c.eval.problems, c.ledger.audit_rows = 2, ROWS
    return freeze(c)


@cache
def params():
    return jax.jit(lambda key: model.init(config().model, key))(jax.random.key(0))


@cache
def player() -> Player:
    c, mode = config(), resolve(config())
    settings = EngineConfig(
        model=c.model,
        precision=mode.rollout,
        eos_ids=TOK.eos_ids,
        plan=mode.plan,
        audit_rows=ROWS,
        **engine_shape(c, SAMPLES),
    )
    return Player(c, shared_engine(settings), TOK, SAMPLES, make_mesh(c.mesh, jax.devices()[:1]))


class Talk:
    """Answers anything with a short text, for ever; fails at a given step of a given seed."""

    def __init__(self, fail: tuple = ()):
        self.fail = fail

    def reset(self, seed):
        self.seed, self.steps = seed, 0
        if (seed, 0) in self.fail:
            raise OSError("no room to play in")
        return "play " + "ab"[seed % 2] * (1 + seed)

    def step(self, action):
        self.steps += 1
        if (self.seed, self.steps) in self.fail:
            raise OSError("the room fell down")
        return Step(f"no {self.steps}", 1.0, self.steps == 3)


@dataclasses.dataclass(frozen=True)
class TalkProblem(EpisodeProblem):
    fail: tuple = ()

    def environment(self):
        return Talk(self.fail)


def problems(fail=()) -> list[TalkProblem]:
    first = lambda seed: Talk().reset(seed) + "\n> "
    return [
        TalkProblem(i, first(i), "", "talk", None, seed=i, fail=fail) for i in range(PROMPTS)
    ]


def keys():
    at = jnp.arange(ROWS, dtype=jnp.int32)
    return request_keys(7, 0, at // SAMPLES, at % SAMPLES)


@cache
def played(fail=()):
    prompts = scoring.make_prompts(problems(fail), TOK, config())
    return player()(rollout_params(), prompts, keys(), version=4), prompts


@cache
def rollout_params():
    return jax.jit(partial(sync.to_rollout, precision=resolve(config()).rollout))(params())


def rows(rollout):
    return np.asarray(rollout.length), np.asarray(rollout.mask), np.asarray(rollout.tokens)


# --- tokens and masks --------------------------------------------------------------------


def test_episodes_have_several_turns_or_the_rest_shows_nothing():
    (_, transcripts), _ = played()
    turns = [len(t.turns) for t in transcripts]
    assert max(turns) == 3 and sum(turns) > ROWS, turns
    assert {t.ending for t in transcripts} <= {"cut", "done", "turns", "tokens"}


def test_the_record_holds_the_ids_of_the_transcripts_and_masks_what_the_environment_said():
    """BR-046, BR-069, BR-070: ids as sampled; observations carry no loss."""
    (rollout, transcripts), _ = played()
    length, mask, tokens = rows(rollout)
    for i, t in enumerate(transcripts):
        assert tokens[i, : length[i]].tolist() == t.ids
        assert mask[i, : length[i]].tolist() == t.mask and not mask[i, length[i] :].any()
        assert not mask[i, : int(rollout.prompt_length[i])].any()
    assert mask.sum() < (length - np.asarray(rollout.prompt_length)).sum(), "something was said"
    assert set(np.asarray(rollout.version).tolist()) == {4}


def test_samples_of_a_prompt_differ_and_a_second_playing_is_the_same():
    (rollout, transcripts), prompts = played()
    assert transcripts[0].ids != transcripts[1].ids
    again = player()(rollout_params(), prompts, keys(), version=4)
    for a, b in zip(jax.tree.leaves(rollout), jax.tree.leaves(again.rollout), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_one_episode_does_leaves_the_others_alone():
    (whole, transcripts), prompts = played()
    order = np.array([4, 5, 2, 3, 0, 1])
    turned = dataclasses.replace(
        prompts,
        tokens=prompts.tokens[::-1],
        lengths=prompts.lengths[::-1],
        problems=prompts.problems[::-1],
    )
    other = player()(rollout_params(), turned, keys()[order], version=4)
    assert [t.ids for t in other.transcripts] == [transcripts[i].ids for i in order]
    np.testing.assert_allclose(other.rollout.logp, np.asarray(whole.logp)[order], atol=1e-4)


# --- the record ----------------------------------------------------------------------------


def test_log_probs_are_those_of_the_training_forward_on_the_whole_transcript():
    (rollout, _), _ = played()
    learner = Learner(config(), resolve(config()))
    logp = jax.jit(learner._score, compiler_options=QUICK)(params(), rollout, 4)
    width, start = config().task.max_response, np.asarray(rollout.prompt_length)
    at = np.minimum(start[:, None] + np.arange(width), rollout.tokens.shape[1] - 1)
    take = lambda x: np.take_along_axis(np.asarray(x), at, 1)
    before_end = start[:, None] + np.arange(width) < np.asarray(rollout.length)[:, None]
    inside = take(rollout.mask) & before_end
    assert inside.sum() == np.asarray(rollout.mask).sum() > 3 * ROWS
    np.testing.assert_allclose(np.asarray(logp)[inside], take(rollout.logp)[inside], atol=2e-3)
    assert (take(rollout.logp)[inside] < 0).all()


def test_codes_routes_and_bits_of_every_fed_token_are_those_of_the_training_forward():
    (rollout, _), _ = played()
    length = np.asarray(rollout.length)
    fed = np.arange(rollout.tokens.shape[1])[None] < length[:, None] - 1
    np.testing.assert_array_equal(rollout.guidance.recorded, fed)
    routes = np.asarray(rollout.routes)
    assert (routes[:, fed] != NOT_RECORDED).all()
    learner = Learner(config(), resolve(config()))
    codes, live = jax.jit(learner._audit, compiler_options=QUICK)(params(), rollout, 4)
    same = np.sort(routes[:, fed], -1) == np.sort(np.asarray(live)[:, fed], -1)
    assert same.mean() > 0.99
    for site, mine in rollout.audit.items():
        a, b = (np.asarray(x)[:, fed] for x in (mine.codes, codes[site].codes))
        a, b = (np.where(x == 8, 0, x) for x in (a, b))
        assert (a == b).mean() > 0.98, site


# --- rewards and failures ----------------------------------------------------------------


def test_a_failed_environment_is_no_reward_of_zero_and_is_counted():
    """BR-129: reset fails for one prompt, a later step for another; the third is judged."""
    (rollout, transcripts), prompts = played(fail=((0, 0), (1, 1)))
    rewards, valid = scoring.episode_rewards(transcripts, prompts, SAMPLES)
    assert not valid[0].any() and valid[2].all() and rewards.dtype == np.float32
    failed = [t.ending == "failed" for t in transcripts[2:4]]
    assert valid[1].tolist() == [not f for f in failed] and any(failed)
    counts = episode_counts(transcripts)
    assert counts["failed_episodes"] == 2 + sum(failed)
    (_, alone), _ = played()
    assert [t.ids for t in transcripts[4:]] == [t.ids for t in alone[4:]]
    assert "no room to play in" in transcripts[0].error


def test_a_record_that_is_not_its_transcript_is_refused():
    def generate(tokens, lengths, turn):
        out = player().call(rollout_params(), tokens, lengths, keys())
        return out.replace(mask=out.mask.at[0, 0].set(True))

    episodes = [p.episode(TOK, scoring.budget(config().task, 9)) for p in problems() for _ in "ab"]
    with pytest.raises(TranscriptError, match="row 0 of the record"):
        play_episodes(episodes, generate, player().opening(played()[1])[0].shape[1])


def test_an_episode_never_outgrows_the_buffers():
    task = config().task
    (rollout, transcripts), prompts = played()
    assert rollout.tokens.shape[1] == task.max_prompt + task.max_response
    for t, n in zip(transcripts, np.repeat(prompts.lengths, SAMPLES), strict=True):
        assert len(t.ids) - n <= task.max_response and len(t.turns) <= task.turns


# --- warm starts -------------------------------------------------------------------------


def test_a_demonstration_teaches_the_actions_and_nothing_that_was_said():
    task = dataclasses.replace(
        config().task, max_prompt=90, max_response=120, turn_tokens=8, observation_tokens=60
    )
    c = dataclasses.replace(config(), task=task)
    problem = scoring.problem_set(c, "train").problem(3)
    plain = ByteTokenizer()
    tokens, mask = encode_examples([problem], plain, c)
    taught = plain.decode(tokens[0][mask[0]].tolist())
    assert taught == problem.answer.replace("\n", "")
    assert mask.sum() == len(problem.answer.split("\n")) + len(taught), "every action with its EOS"
    for tight in ({"max_response": 8}, {"turn_tokens": 4}, {"max_prompt": 20}):
        short = dataclasses.replace(c, task=dataclasses.replace(task, **tight))
        assert not encode_examples([problem], plain, short)[1].any(), "it does not fit"


def test_a_budget_of_turns_beyond_32_is_refused():
    with pytest.raises(ConfigError, match=r"task\.turns is 33; write 32 or less"):
        dataclasses.replace(config(), task=dataclasses.replace(config().task, turns=33))


# --- a whole run ---------------------------------------------------------------------------


def test_a_run_of_episodes_trains_counts_and_goes_on_as_if_nothing_had_happened(
    tmp_path, monkeypatch
):
    share_compiled(monkeypatch)
    monkeypatch.setattr("trace_jax.actor.run_tokenizer", lambda config: TOK)
    task = {k: getattr(config().task, k) for k in ("kind", "params", "turns", "turn_tokens")}
    task |= {"max_prompt": 80, "max_response": 40, "observation_tokens": 12}
    small = {"prompts_per_step": 4, "samples": 2}
    config_of = lambda steps: tiny(
        task=task,
        rl=small | {"steps": steps, "algorithm": "dapo"},
        warmup={"steps": 0},
        ledger={"audit_rows": 2},
    )
    whole = loop.train(config_of(2), tmp_path / "whole")
    loop.train(config_of(1), tmp_path / "halves")
    halves = loop.train(config_of(2), tmp_path / "halves", resume=True)
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "halves")
    for a, b in zip(*map(jax.tree.leaves, (whole.params, halves.params)), strict=True):
        np.testing.assert_array_equal(a, b)
    row = rows_of(tmp_path / "whole")[0]
    assert row["rollout/turns"] >= 1 and row["rollout/failed_episodes"] == 0
    assert row["rollout/unscored"] == 0 and row["agreement/mean"] > 0.95
    # A random model gets nowhere: DAPO draws as often as it may, and what is flat is counted.
    assert (row["rollout/draws"], row["rollout/flat_groups"]) == (MAX_DRAWS, 4)
    assert row["mismatch/gap_mean"] < 0.05, "log-probs of all turns line up"
    assert set(whole.before) == {"accuracy", "accuracy/key_maze"}
