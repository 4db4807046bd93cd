"""What the scheduler moves about: requests, prompts that they share, and chunks of them."""

import array
import dataclasses
import functools
from collections.abc import Callable


@dataclasses.dataclass(eq=False)
class Sequence:
    """One request.

    Attributes:
      row: its row in the record.
      tokens: what is known: prompt, sampled and appended tokens.
      prompt: tokens of the prompt.
      limit: tokens it may have in all.
      sampled: for each token, whether it was drawn.
      logp: for each token, its log-probability where it was drawn, else 0.
      stored: leading tokens whose keys and values stand in `pages`.
      state: the place that keeps its state while it is held, or None.
      done: None, or why it ended: "eos", "length" or "stop".
      preempted: how often it lost its pages.
      hold: keep its pages when it ends, to be continued.
      first_slot: the only slot that it may have, or None for any.
    """

    row: int
    tokens: list[int]
    limit: int
    prompt: int = 0
    sampled: list[bool] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    stored: int = 0
    state: int | None = None
    done: str | None = None
    preempted: int = 0
    hold: bool = False
    first_slot: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        self.prompt = len(self.tokens)
        self.sampled = [False] * self.prompt
        self.logp = [0.0] * self.prompt

    @property
    def prefix(self) -> int:
        """Tokens that prefill stores: the prompt but for its last one."""
        return self.prompt - 1

    @functools.cached_property
    def prefix_key(self) -> bytes:
        """Names the prefilled tokens; made once, and bytes keep their hash."""
        return array.array("i", self.tokens[: self.prefix]).tobytes()


@dataclasses.dataclass
class Prefix:
    """A prefilled prompt whose pages may be shared; `row` holds its record, `state` its state."""

    pages: list[int]
    row: int
    state: int | None


@dataclasses.dataclass
class Chunk:
    """Tokens start to stop of a sequence, to be prefilled."""

    sequence: Sequence
    start: int
    stop: int


def cut_at_stop(s: Sequence, new: int, decode_text: Callable[[list[int]], str]) -> bool:
    """Drops what was drawn after the token that completes a stop string.

    Returns whether one of the last `new` tokens does.
    """
    first = len(s.sampled) - s.sampled[::-1].index(False)  # of this turn's response
    for end in range(len(s.tokens) - new + 1, len(s.tokens) + 1):
        text = decode_text(s.tokens[first:end])
        if any(stop in text for stop in s.stop):
            del s.tokens[end:], s.sampled[end:], s.logp[end:]
            s.stored = min(s.stored, end - 1)
            return True
    return False
