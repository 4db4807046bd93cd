"""gymnasium's FrozenLake and Taxi told in text; gymnasium is imported only when one is made."""

from __future__ import annotations

from collections import deque

from trace_jax.tasks.environments import Step


def _gymnasium():
    try:
        import gymnasium
        import gymnasium.envs.toy_text
    except ImportError as error:
        raise ValueError('gymnasium is missing: pip install "trace_jax[env]"') from error
    return gymnasium


def _shortest(table: dict, start: int, names: dict[str, int]) -> list[str]:
    """Fewest actions to a rewarded end, from gymnasium's table of transitions."""
    seen, queue = {start}, deque([(start, [])])
    while queue:
        state, actions = queue.popleft()
        for name, move in names.items():
            _, there, reward, done = table[state][move][0]
            if done and reward > 0:
                return [*actions, name]
            if not done and there not in seen:
                seen.add(there)
                queue.append((there, [*actions, name]))
    raise AssertionError("an episode without a way to its end")


class FrozenLake:
    """Walk from S to G over F, never into H. Maps come from the seed; the ice is not slippery.

    Args:
        size: rows and columns, 2 to 12.
    """

    ACTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}

    def __init__(self, size: int = 4):
        if not 2 <= size <= 12:
            raise ValueError(f"size is {size}: write 2 to 12")
        self.size = size
        self._gym = _gymnasium()

    def reset(self, seed: int) -> str:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        # The class itself: a time limit of the registry's would end episodes behind our back.
        make = self._gym.envs.toy_text.FrozenLakeEnv
        self._env = make(desc=generate_random_map(self.size, seed=seed), is_slippery=False)
        self._at, _ = self._env.reset(seed=seed)
        return f"Reach G, avoid H; you are A. Say {', '.join(self.ACTIONS)}.\n{self._map()}"

    def _map(self) -> str:
        rows = [[cell.decode() for cell in row] for row in self._env.desc]
        rows[self._at // self.size][self._at % self.size] = "A"
        return "\n".join(map("".join, rows))

    def step(self, action: str) -> Step:
        move = self.ACTIONS.get(action.strip().lower())
        if move is None:
            return Step(f"That is no move.\n{self._map()}")
        self._at, reward, done, _, _ = self._env.step(move)
        return Step(self._map(), float(reward > 0), bool(done))

    def solution(self) -> list[str]:
        return _shortest(self._env.P, int(self._at), self.ACTIONS)


class Taxi:
    """Fetch the passenger and bring them to their destination."""

    ACTIONS = {"south": 0, "north": 1, "east": 2, "west": 3, "pickup": 4, "dropoff": 5}
    STANDS = ("R", "G", "Y", "B", "the taxi")

    def __init__(self):
        self._gym = _gymnasium()

    def reset(self, seed: int) -> str:
        self._env = self._gym.envs.toy_text.TaxiEnv()
        self._state, _ = self._env.reset(seed=seed)
        board = "\n".join("".join(c.decode() for c in row) for row in self._env.desc)
        return (
            f"Bring the passenger to the destination. Say {', '.join(self.ACTIONS)}.\n"
            f"| is a wall.\n{board}\n{self._look()}"
        )

    def _look(self) -> str:
        row, column, passenger, goal = self._env.decode(self._state)
        return (
            f"Taxi: row {row}, column {column}. Passenger: {self.STANDS[passenger]}. "
            f"Destination: {self.STANDS[goal]}."
        )

    def step(self, action: str) -> Step:
        move = self.ACTIONS.get(action.strip().lower())
        if move is None:
            return Step(f"That is no action. {self._look()}")
        self._state, reward, done, _, _ = self._env.step(move)
        # Its own reward is 20 for the delivery and a penalty for every other step.
        return Step(self._look(), float(bool(done) and reward > 0), bool(done))

    def solution(self) -> list[str]:
        return _shortest(self._env.P, int(self._state), self.ACTIONS)
