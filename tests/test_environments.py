"""The environments: episodes by seed, what they say, what they refuse."""

import subprocess
import sys

import pytest
from episode_helpers import run

from trace_jax.tasks.environments import Step, make_environment
from trace_jax.tasks.tool_task import calculate

NO_GYM = "gymnasium is not installed"


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
