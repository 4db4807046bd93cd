"""Episodes of several turns: exact tokens, masks, budgets, rewards; and the environments."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
from trace_jax.tasks.tool_task import calculate

TOK = ByteTokenizer()
NO_GYM = "gymnasium is not installed"


class Script:
    """A policy that says given texts in turn and keeps the prompts it saw."""

    def __init__(self, *texts, end=True):
        self.texts, self.seen, self.end = list(texts), [], end

    def __call__(self, ids):
        self.seen.append(list(ids))
        text = self.texts[min(len(self.seen), len(self.texts)) - 1]
        ids = list(text) if isinstance(text, (list, tuple)) else TOK.encode(text)
        return [*ids, TOK.eos_id] if self.end else ids


class Echo:
    """Answers every action with a fixed text; over, with a reward, at "stop"."""

    def __init__(self, reply="ok", reward=1.0):
        self.reply, self.reward, self.actions = reply, reward, []

    def reset(self, seed):
        return f"start {seed}"

    def step(self, action):
        self.actions.append(action)
        return Step(self.reply, self.reward, action == "stop")


def run(env, *texts, seed=0, **budget):
    budget = {"turn_tokens": 32, "observation_tokens": 400, "episode_tokens": 4000, **budget}
    policy = Script(*texts)
    return play(Episode(env, seed, TOK, Budget(**budget)), policy), policy


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


# Environments


SOLVABLE = [("key_maze", dict(width=3, height=3, keys=1)), ("key_maze", dict(keys=0)),
            ("key_maze", dict(width=4, height=3, keys=3)), ("tools", dict(items=1)),
            ("tools", dict(items=8)), ("tools", dict(items=2, store=True))]


@pytest.mark.parametrize("name, params", SOLVABLE)
def test_every_episode_can_be_solved_within_32_turns(name, params):
    env, texts = make_environment(name, **params), set()
    for seed in range(40):
        texts.add(env.reset(seed))
        plan = env.solution()
        assert len(plan) <= 32
        steps = [env.step(action) for action in plan]
        assert steps[-1].done and steps[-1].reward == 1.0
        assert not any(step.done or step.reward for step in steps[:-1])
    assert len(texts) >= 4


@pytest.mark.parametrize("name, params", SOLVABLE)
def test_an_episode_depends_on_its_seed_alone(name, params):
    def told(env, seed, actions):
        return [env.reset(seed), *(env.step(a).observation for a in actions)]

    env = make_environment(name, **params)
    env.reset(7)
    plan = env.solution()
    first = told(env, 7, plan)
    told(env, 8, ["take", "north", "get apple"])
    assert told(env, 7, plan) == told(make_environment(name, **params), 7, plan) == first


def test_maze_doors_need_their_keys():
    env, locked = make_environment("key_maze", width=4, height=4, keys=2), 0
    for seed in range(30):
        env.reset(seed)
        plan = [a for a in env.solution() if a != "take"]
        said = [env.step(action) for action in plan]
        assert not any(step.done for step in said), "the way out without any key"
        locked += any(step.observation.startswith("Locked") for step in said)
    assert locked == 30


def test_bad_actions_cost_a_turn_and_nothing_else():
    env = make_environment("key_maze")
    env.reset(0)
    plan = env.solution()
    for action in ("", "fly", "take north", "NORTH POLE", "\ufffd", "exit", "You are out."):
        assert env.step(action) == env.step(action) and not env.step(action).done
    assert env.solution() == plan
    assert [env.step(a.upper() + "\n") for a in plan][-1].reward == 1.0


def test_tools_do_what_they_say():
    env = make_environment("tools", items=2)
    env.reset(0)
    said = lambda action: env.step(action).observation
    assert said("calc 2 * (3 + 4) - -1") == "15" and said("put x 12") == "stored"
    assert said("get x") == "12" and said("get y") == "nothing there"
    assert said("put x 1e9").startswith("unknown") and said("help").startswith("unknown")
    assert said("done").startswith("unknown"), "this task asks for an answer"
    goal = int(env.solution()[-1].split()[1])
    assert not env.step(f"say answer {goal}").done
    assert env.step(f"answer {goal}.0").reward == 0.0
    store = make_environment("tools", items=1, store=True)
    store.reset(0)
    assert store.step("done") == Step("Wrong.", 0.0, True)


def test_the_store_is_bounded():
    env = make_environment("tools")
    env.reset(0)
    names = [a + b for a in "abcdefghij" for b in "abcdefghij"]
    assert "the store is full" in [env.step(f"put {name} 1").observation for name in names]
    assert env.step("put aa 2").observation == "stored", "but a name may be written again"


@pytest.mark.parametrize("text", ["9**9**9", "1/0", "x", "__import__('os')", "1e3", "True", "'a'*9",
                                  "9" * 13, "999999 * 9999999", "(" * 90, "1 +", "", "1\x002"])
def test_the_calculator_takes_arithmetic_only(text):
    assert calculate(text) is None


@pytest.mark.parametrize(
    "name, params, message",
    [
        ("key_mase", {}, "write key_maze"),
        ("key_maze", dict(keys=9), "write 0 to 4"),
        ("key_maze", dict(width=1, height=1), "4 rooms"),
        ("key_maze", dict(rooms=3), "refused"),
        ("tools", dict(items=0), "write 1 to 8"),
        ("frozen_lake", dict(size=1), "write 2 to 12"),
    ],
)
def test_bad_environments_are_one_clear_line(name, params, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_environment(name, **params)
    assert "\n" not in str(caught.value)


def test_a_missing_gymnasium_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    for name in ("frozen_lake", "taxi"):
        with pytest.raises(ValueError, match=r"trace_jax\[env\]"):
            make_environment(name)


def test_importing_tasks_imports_no_gymnasium():
    code = "import sys, trace_jax.tasks.gym_text; sys.exit('gymnasium' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_frozen_lake_in_text():
    pytest.importorskip("gymnasium", reason=NO_GYM)
    env = make_environment("frozen_lake", size=4)
    boards = {env.reset(seed).partition("\n")[2] for seed in range(8)}
    assert len(boards) > 4 and all(b.count("A") == 1 and b.count("G") == 1 for b in boards)
    path = _lake_path(env.reset(1).partition("\n")[2].split("\n"))
    steps = [env.step(action) for action in path]
    assert steps[-1].reward == 1.0 and steps[-1].done and steps[0].observation[0] != "A"
    board = env.reset(1).partition("\n")[2]
    assert env.step("jump") == Step(f"That is no move.\n{board}")
    falls = [run(env, *_lake_path(env.reset(s).partition("\n")[2].split("\n"), "H"), seed=s)[0]
             for s in (1, 2)]
    assert all(t.reward == 0.0 and t.ending == "done" for t in falls)


def _lake_path(board, goal="G"):
    """Actions from A to the nearest goal, by breadth first."""
    moves = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    queue, seen = [((0, 0), [])], {(0, 0)}
    for (row, column), path in queue:
        if board[row][column] == goal:
            return path
        if board[row][column] == "H":
            continue
        for name, (down, right) in moves.items():
            cell = (row + down, column + right)
            if cell not in seen and 0 <= min(cell) and max(cell) < len(board):
                seen.add(cell)
                queue.append((cell, [*path, name]))
    raise AssertionError(board)


def test_taxi_in_text():
    pytest.importorskip("gymnasium", reason=NO_GYM)
    env = make_environment("taxi")
    assert len({env.reset(seed) for seed in range(8)}) > 4
    first = env.reset(2)
    assert "Taxi: row" in first and env.reset(2) == first
    assert env.step("fly").observation.startswith("That is no action.")
    assert not env.step("dropoff").reward and not env.step("pickup").done
    steps = _drive(env, 2)
    assert steps[-1].done and steps[-1].reward == 1.0
    assert not any(step.reward for step in steps[:-1])


def _drive(env, seed):
    """Fetches and delivers; rows 2 and the middle column have no walls."""
    stands = {"R": (0, 0), "G": (0, 4), "Y": (4, 0), "B": (4, 3)}
    env.reset(seed)
    row, column, passenger, goal = env._env.decode(env._state)
    steps, at = [], (row, column)

    def go(to):
        nonlocal at
        there = stands[to]
        turn = lambda n, plus, minus: [plus if n > 0 else minus] * abs(n)
        plan = turn(2 - at[0], "south", "north") + turn(there[1] - at[1], "east", "west")
        plan += turn(there[0] - 2, "south", "north")
        steps.extend(env.step(action) for action in plan)
        at = there

    go("RGYB"[passenger])
    steps.append(env.step("pickup"))
    go("RGYB"[goal])
    steps.append(env.step("dropoff"))
    return steps
