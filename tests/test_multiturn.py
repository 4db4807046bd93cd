"""Episodes of several turns: exact tokens, masks, budgets, rewards."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from episode_helpers import TOK, Script, run

from trace_jax.tasks import ByteTokenizer
from trace_jax.tasks.environments import Step, make_environment
from trace_jax.tasks.multiturn import (
    Budget,
    Episode,
    Transcript,
    TranscriptError,
    play,
    play_all,
)


class Echo:
    """Answers every action with a fixed text; over, with a reward, at "stop"."""

    def __init__(self, reply="ok", reward=1.0):
        self.reply, self.reward, self.actions = reply, reward, []

    def reset(self, seed):
        return f"start {seed}"

    def step(self, action):
        self.actions.append(action)
        return Step(self.reply, self.reward, action == "stop")


# Tokens


def test_sampled_ids_are_kept_however_they_would_be_encoded_again():
    """BR-046: next prompt = old ids + new ids + the environment's ids, nothing re-encoded."""

    class Merging(ByteTokenizer):
        """Also has 300 = "he", 301 = "llo" and 302 = "hello", which encoding prefers."""

        pieces = {300: b"he", 301: b"llo", 302: b"hello"}

        def encode(self, text):
            return [302] if text == "hello" else super().encode(text)

        def decode(self, ids):
            return b"".join(self.pieces.get(i, bytes([i % 256])) for i in ids).decode()

    tok, env = Merging(), Echo()
    policy = Script([300, 301], "stop")
    transcript = play(Episode(env, 5, tok, Budget()), policy)
    assert env.actions == ["hello", "stop"] and tok.encode("hello") == [302]
    first = [tok.bos_id, *b"start 5\n> "]
    assert policy.seen == [first, [*first, 300, 301, tok.eos_id, *b"\nok\n> "]]
    assert transcript.ids == [*policy.seen[1], *b"stop", tok.eos_id]


def test_a_template_that_rewrites_history_is_detected():
    """BR-047: the next prompt must extend the ids; a dropped <think> does not."""
    transcript = Transcript()
    transcript.observe(TOK.encode("user: 2+2\nassistant: "))
    transcript.act(TOK.encode("<think>two twos</think>4"))
    kept = list(transcript.ids)
    with pytest.raises(TranscriptError, match=r"differs .* at position 21") as caught:
        transcript.adopt(TOK.encode("user: 2+2\nassistant: 4\nuser: 3+3\nassistant: "))
    assert "\n" not in str(caught.value) and transcript.ids == kept
    with pytest.raises(TranscriptError, match=f"position {len(kept) - 1}"):
        transcript.adopt(kept[:-1])
    transcript.adopt([*kept, *TOK.encode("\nuser: 3+3\nassistant: ")])
    transcript.act(TOK.encode("6"))
    transcript.check()
    written = [i for i, model in zip(transcript.ids, transcript.mask, strict=True) if model]
    assert TOK.decode(written) == "<think>two twos</think>46"


def test_special_tokens_in_an_answer_shift_nothing():
    """BR-048: they vanish from the text, stay in the ids, and the mask goes by ids."""
    env = Echo()
    odd = [TOK.bos_id, *b"lo", TOK.pad_id, *b"ok"]
    transcript, _ = run(env, odd, "stop")
    assert env.actions == ["look", "stop"]
    (start, end), (again, last) = transcript.turns
    assert transcript.ids[start:end] == [*odd, TOK.eos_id]
    assert TOK.decode(transcript.ids[end:again]) == "\nok\n> "
    assert not any(transcript.mask[end:again]) and all(transcript.mask[again:last])
    transcript.mask[end] = True
    with pytest.raises(TranscriptError, match="mask and turns disagree"):
        transcript.check()


def test_multi_byte_characters_over_tokens_and_turns():
    """BR-160: one decode of all ids of an answer; broken bytes are text like any other."""
    env = Echo(reply="😀")
    transcript, _ = run(env, [240, 159, 152, 128], [240, 159], "stop")
    assert env.actions == ["😀", "\ufffd", "stop"]
    assert TOK.decode(transcript.ids).count("😀") == 3


def test_changing_the_prompt_in_a_policy_changes_no_transcript():
    def policy(ids):
        ids.clear()
        return [*TOK.encode("stop"), TOK.eos_id]

    transcript = play(Episode(Echo(), 0, TOK), policy)
    assert TOK.decode(transcript.ids) == "start 0\n> stop"


# Masks and rewards


def test_observation_tokens_have_no_gradient():
    """BR-070: through the project's own loss; zero for what was read, not for what was written."""
    from trace_jax.rl.losses import aggregation_weights

    transcript, _ = run(Echo(), "go", "stop")
    targets = jnp.array(transcript.ids)[None]
    mask = jnp.array(transcript.mask)[None]
    weights = aggregation_weights(mask, "token_mean", max_length=targets.shape[1])

    def loss(logits):
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
        return -jnp.sum(weights * logp[..., 0])

    gradient = jax.grad(loss)(jnp.zeros((*targets.shape, TOK.vocab_size)))
    size = np.abs(np.asarray(gradient[0])).sum(axis=-1)
    assert np.array_equal(size > 0, transcript.mask)
    assert sum(transcript.mask) == len("go") + len("stop") + 2


def test_the_environments_words_earn_nothing():
    """BR-069: the gold number is in the tool's reply, the model does not say it."""
    env = make_environment("tools", items=2)
    env.reset(3)
    *gets, calc, answer = env.solution()
    gold = answer.removeprefix("answer ")
    told, policy = run(env, calc, "answer I do not know", seed=3)
    assert gold in TOK.decode(policy.seen[-1]), "the environment said it"
    assert told.reward == 0.0 and told.ending == "done"
    assert run(env, calc, f"I do not know. {gold}", "answer", seed=3)[0].reward == 0.0
    assert run(env, *gets, calc, answer, seed=3)[0].reward == 1.0


def test_the_reward_is_on_the_last_token_of_the_model():
    """BR-069."""
    transcript, _ = run(Echo(reward=0.5), "go", "stop")
    rewards = transcript.token_rewards()
    assert rewards.dtype == np.float32 and rewards[-1] == 0.5 and rewards[:-1].sum() == 0
    assert transcript.mask[-1]
    transcript.observe(TOK.encode(" trailing"))
    rewards = transcript.token_rewards()
    assert rewards[-1] == 0 and rewards[len(rewards) - len(" trailing") - 1] == 0.5


def test_a_reward_before_the_end_does_not_count():
    transcript, _ = run(Echo(reward=1.0), "go", turns=3)
    assert (transcript.reward, transcript.ending) == (0.0, "turns")


# Budgets


def test_an_answer_that_hits_its_budget_is_not_carried_out():
    env = Echo()
    episode = Episode(env, 0, TOK, Budget(turn_tokens=4))
    transcript = play(episode, Script("stop", end=False))
    assert (transcript.reward, transcript.ending, env.actions) == (0.0, "cut", [])


def test_turns_end_at_their_number():
    transcript, policy = run(Echo(), "go", turns=32)
    assert len(policy.seen) == len(transcript.turns) == 32 and transcript.ending == "turns"
    assert transcript.mask[-1] and all(transcript.token_rewards() == 0)


def test_an_episode_never_outgrows_its_tokens():
    """BR-162: each turn finds room for a whole answer, or there is no turn."""
    for limit in range(20, 120):
        transcript, _ = run(Echo(), "hello", turn_tokens=8, episode_tokens=limit)
        assert len(transcript.ids) <= limit and transcript.ending == "tokens"
        assert not transcript.turns or transcript.mask[-1]
    none, policy = run(Echo(), "hello", turn_tokens=8, episode_tokens=10)
    assert not policy.seen and not none.ids and none.reward == 0.0


def test_a_long_observation_is_cut_and_counted():
    """BR-158."""
    transcript, policy = run(Echo(reply="x" * 1000), "go", "stop", observation_tokens=50)
    assert transcript.cut_observations == 1
    assert len(policy.seen[1]) - len(policy.seen[0]) == len("go") + 1 + 50


@pytest.mark.parametrize("bad", [dict(turns=0), dict(turns=33), dict(turn_tokens=0)])
def test_bad_budgets_are_one_clear_line(bad):
    with pytest.raises(ValueError, match="write 1"):
        Budget(**bad)


@pytest.mark.parametrize(
    "ids, message",
    [([], "has 0 ids"), ([65] * 65, "has 65 ids"), ([65, 258, 66], "after its end-of-turn")],
)
def test_impossible_answers_are_refused(ids, message):
    with pytest.raises(TranscriptError, match=message):
        Episode(Echo(), 0, TOK).respond(ids)


def test_an_episode_that_is_over_takes_no_answer():
    episode = Episode(Echo(), 0, TOK)
    episode.respond([*TOK.encode("stop"), TOK.eos_id])
    with pytest.raises(TranscriptError, match="over"):
        episode.respond([TOK.eos_id])


# Outages


def test_a_failing_environment_gives_no_reward_at_all():
    """BR-129: None, so that the sample is dropped; a failing policy is the caller's to see."""

    class Broken(Echo):
        def step(self, action):
            raise ConnectionError("the tool is down")

    class Unborn(Echo):
        def reset(self, seed):
            raise OSError("no map")

    transcript, _ = run(Broken(), "go")
    assert transcript.reward is None and transcript.ending == "failed"
    assert transcript.error == "ConnectionError: the tool is down"
    assert all(transcript.token_rewards() == 0)
    unborn, policy = run(Unborn(), "go")
    assert unborn.reward is None and not policy.seen

    def policy(ids):
        raise RuntimeError("engine")

    with pytest.raises(RuntimeError, match="engine"):
        play(Episode(Echo(), 0, TOK), policy)


def test_many_episodes_give_what_each_gives_alone():
    envs = lambda: [make_environment("key_maze", keys=1) for _ in range(4)]
    plans = []
    for seed, env in enumerate(envs()):
        env.reset(seed)
        plans.append(env.solution())
    alone = [run(env, *plan, seed=i)[0] for i, (env, plan) in enumerate(zip(envs(), plans,
                                                                            strict=True))]
    budget = Budget(turn_tokens=32, observation_tokens=400, episode_tokens=4000)
    episodes = [Episode(env, i, TOK, budget) for i, env in enumerate(envs())]

    def generate(prompts):
        out = []
        for prompt in prompts:
            i = next(k for k, e in enumerate(episodes) if not e.done and e.prompt == prompt)
            turn = len(episodes[i].transcript.turns)
            out.append([*TOK.encode(plans[i][turn]), TOK.eos_id])
        return out

    together = play_all(episodes, generate)
    assert together == alone and [t.reward for t in together] == [1.0] * 4
    assert len({len(t.turns) for t in together}) > 1, "episodes of different length"
    with pytest.raises(ValueError):
        play_all([Episode(Echo(), 0, TOK)], lambda prompts: [])
