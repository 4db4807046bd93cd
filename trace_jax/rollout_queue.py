"""Rollouts between actor and learner: generation runs ahead by a bounded number of versions.

With lag L the rollout of step s is drawn with the weights of version max(s - L, 0), and is
dispatched before the update of step s - L: the device draws it while the host judges an older
one. Everything is dispatched in the order of the steps by one thread, so equal seeds and an equal
lag give equal runs, on any number of processes. The batch engine's single answers overlap; the
continuous engine and episodes are host loops, which have the same lag and no overlap.

A checkpoint holds the waiting rollouts themselves, judged: drawing them again would take the
weights of the last L versions, which are larger than the rollouts and gone by then.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from trace_jax.draws import Draw
from trace_jax.parallel import to_host
from trace_jax.play import Played
from trace_jax.rollout import Rollout
from trace_jax.scoring import Prompts


class QueueError(RuntimeError):
    """A rollout is not of the step, prompt or policy version that it passes for."""


class Launched(NamedTuple):
    """The rollout of one step: dispatched, not yet judged. `version` is that of its weights.

    `played` holds the record where the learner reads it, `made` where it was made; on one mesh
    the two are one.
    """

    step: int
    version: int
    prompts: Prompts
    played: Played
    made: Rollout


class RolloutQueue:
    """Rollouts that were dispatched and not yet learned from, oldest first.

    Between two iterations `lag` of them wait. The queue stays full to the end of a run, so that
    one that is extended later is the run that was longer from the start.
    """

    def __init__(self, lag: int):
        self.lag = lag
        self._waiting: deque[Launched | Draw] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def version_of(self, step: int) -> int:
        """The policy version that draws a step."""
        return max(step - self.lag, 0)

    def fill(self, step: int, launch: Callable[[int], Launched]) -> None:
        """Launches what is missing of the steps from `step` to `step + lag`."""
        while len(self._waiting) <= self.lag:
            self._waiting.append(launch(step + len(self._waiting)))

    def take(self, step: int, judge: Callable[[Launched], Draw]) -> Draw:
        """The oldest rollout, judged. Raises QueueError unless it is of `step`."""
        item = self._waiting.popleft()
        if isinstance(item, Draw):
            return item
        wanted = (step, self.version_of(step))
        if (item.step, item.version) != wanted:
            raise QueueError(
                f"the queue has step {item.step} of version {item.version} where step "
                f"{wanted[0]} of version {wanted[1]} is due"
            )
        return judge(item)

    def judged(self, judge: Callable[[Launched], Draw]) -> list[Draw]:
        """What waits, as a checkpoint holds it; it keeps waiting, judged."""
        self._waiting = deque(d if isinstance(d, Draw) else judge(d) for d in self._waiting)
        return list(self._waiting)

    def load(self, draws: list[Draw]) -> None:
        """Replaces what waits by the draws of a checkpoint."""
        self._waiting = deque(draws)


def check_groups(rollout: Rollout, prompts: Prompts, samples: int, version: int) -> None:
    """Refuses a rollout that mixes prompts or versions, or is of others.

    Args:
      samples: rows a group; row i answers prompt i // samples.
      version: policy version that every row must be of.

    Raises:
      QueueError: names the first row that does not belong.
    """
    tokens, length, of = map(to_host, (rollout.tokens, rollout.prompt_length, rollout.version))
    groups = np.arange(len(tokens)) // samples
    width = prompts.tokens.shape[1]
    inside = np.arange(width)[None] < prompts.lengths[groups][:, None]
    same = np.where(inside, tokens[:, :width] == prompts.tokens[groups], True).all(1)
    same &= length == prompts.lengths[groups]
    for wrong, what in ((~same, "another prompt"), (of != version, "another policy version")):
        if wrong.any():
            row = int(np.argmax(wrong))
            raise QueueError(
                f"row {row}, group {row // samples}: {what} than its step's (version {version})"
            )
