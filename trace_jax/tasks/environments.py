"""Text environments of several turns: the interface, and how to make one by name.

An environment judges by its own state and by what the model wrote in this turn; it never reads
its own texts again, so a reward cannot come from words that the environment said.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Step:
    """What one action did. `reward` counts only where `done` is true."""

    observation: str
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode at a time; the same seed gives the same episode."""

    def reset(self, seed: int) -> str:
        """Starts an episode and returns its first observation."""

    def step(self, action: str) -> Step:
        """Takes the model's text of one turn. A bad action costs a turn and is no error."""

    def solution(self) -> list[str]:
        """Actions that solve the episode from where it stands; for tests and warm starts."""


ENVIRONMENTS = ("key_maze", "tools", "frozen_lake", "taxi")


def _kinds() -> dict[str, type]:
    # Here, because each of them imports this file.
    from trace_jax.tasks.gym_text import FrozenLake, Taxi
    from trace_jax.tasks.maze import KeyMaze
    from trace_jax.tasks.tool_task import ToolTask

    return {"key_maze": KeyMaze, "tools": ToolTask, "frozen_lake": FrozenLake, "taxi": Taxi}


def make_environment(name: str, **params) -> Environment:
    """key_maze, tools, frozen_lake or taxi; params set the difficulty.

    Raises:
        ValueError: an unknown name or parameter; gymnasium missing for the last two.
    """
    kinds = _kinds()
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1) or sorted(kinds)
        raise ValueError(f"there is no environment {name!r}: write {' or '.join(near)}")
    try:
        return kinds[name](**params)
    except TypeError as error:
        raise ValueError(f"{name}: parameters {params} are refused: {error}") from error
