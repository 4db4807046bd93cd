"""Episodes of several turns as token-exact transcripts.

The ids of a transcript only ever grow: sampled ids stay as they were sampled, and what the
environment says is appended as ids of its own. Nothing is decoded and encoded again. This room
knows no engine: an episode gives prompts and takes new ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trace_jax.tasks.environments import Environment

MAX_TURNS = 32


class TranscriptError(ValueError):
    """Ids that do not continue a transcript: training on them would score wrong contexts."""


@dataclass(frozen=True)
class Budget:
    """Tokens of one answer, of one observation and of all, and the number of turns (up to 32).

    `prompt_tokens` is for the first observation; None: as for the others.
    """

    turn_tokens: int = 64
    observation_tokens: int = 256
    episode_tokens: int = 2048
    turns: int = 16
    prompt_tokens: int | None = None

    def __post_init__(self):
        for name in ("turn_tokens", "observation_tokens", "episode_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"budget {name} is {getattr(self, name)}: write 1 or more")
        if not 1 <= self.turns <= MAX_TURNS:
            raise ValueError(f"budget turns is {self.turns}: write 1 to {MAX_TURNS}")


@dataclass
class Transcript:
    """The tokens of one episode and its reward.

    Attributes:
        ids: everything the model has read or written, in order.
        mask: True where the model wrote the id; only these may carry loss.
        turns: (start, end) of every answer in ids.
        reward: of the episode; None when the environment failed, so the sample is dropped.
        ending: "done", "turns", "tokens" or "cut" (a budget ran out), "failed"; "" while open.
        error: what failed.
        cut_observations: observations that were longer than their budget.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    reward: float | None = None
    ending: str = ""
    error: str = ""
    cut_observations: int = 0

    def observe(self, ids: Sequence[int]) -> None:
        """Appends ids that the model did not write."""
        self._append(ids, False)

    def act(self, ids: Sequence[int]) -> None:
        """Appends the ids of one answer, exactly as sampled."""
        self.turns.append((len(self.ids), len(self.ids) + len(ids)))
        self._append(ids, True)

    def _append(self, ids: Sequence[int], model: bool) -> None:
        self.ids += map(int, ids)
        self.mask += [model] * len(ids)

    def adopt(self, prompt: Sequence[int]) -> None:
        """Takes a next prompt that something else rendered, such as a chat template.

        Raises:
            TranscriptError: it does not extend the ids; a template that drops or rewrites earlier
                turns, or text that was encoded again.
        """
        prompt = list(map(int, prompt))
        if prompt[: len(self.ids)] != self.ids:
            same = next(
                (i for i, (a, b) in enumerate(zip(self.ids, prompt, strict=False)) if a != b),
                min(len(self.ids), len(prompt)),
            )
            raise TranscriptError(
                f"the next prompt differs from the {len(self.ids)} ids so far at position {same}: "
                "append new ids to the old ones, or start a new transcript"
            )
        self.observe(prompt[len(self.ids) :])

    def check(self) -> None:
        """Raises TranscriptError unless the mask covers the answers and nothing else."""
        wrote = [False] * len(self.ids)
        for start, end in self.turns:
            wrote[start:end] = [True] * (end - start)
        if wrote != self.mask or any(a[1] > b[0] for a, b in zip(self.turns, self.turns[1:],
                                                                 strict=False)):
            raise TranscriptError("mask and turns disagree: append by observe, act and adopt only")

    def token_rewards(self) -> np.ndarray:
        """f32 [len(ids)]: the reward on the last token that the model wrote, else 0."""
        rewards = np.zeros(len(self.ids), np.float32)
        if self.turns and self.reward is not None:
            rewards[self.turns[-1][1] - 1] = self.reward
        return rewards


class Episode:
    """One environment being played: read `prompt`, sample, hand the ids to `respond`, until `done`.

    Args:
        env: the environment; its exceptions end the episode without a reward.
        seed: which episode.
        tokenizer: decodes answers, encodes observations.
        budget: limits; an answer that hits its own is not carried out and earns 0.
        encode: (observation, whether it is the first) to ids, for chat formats; the default
            writes plain text that ends in "> ".
    """

    def __init__(
        self,
        env: Environment,
        seed: int,
        tokenizer,
        budget: Budget = Budget(),  # noqa: B008
        encode: Callable[[str, bool], Sequence[int]] | None = None,
    ):
        self.transcript = Transcript()
        self._env, self._tokenizer, self._budget = env, tokenizer, budget
        self._encode = encode or self._plain
        try:
            observation = env.reset(seed)
        except Exception as error:
            self._fail(error)
        else:
            self._observe(observation, first=True)

    def _plain(self, text: str, first: bool) -> list[int]:
        start = [self._tokenizer.bos_id] if first else []
        return [*start, *self._tokenizer.encode(f"{text}\n> " if first else f"\n{text}\n> ")]

    @property
    def done(self) -> bool:
        return bool(self.transcript.ending)

    @property
    def prompt(self) -> list[int]:
        """A copy of all ids so far, which the next answer continues."""
        return list(self.transcript.ids)

    def respond(self, ids: Sequence[int]) -> None:
        """Takes one answer: 1 to `turn_tokens` ids, the end-of-turn id at the end if at all.

        Raises:
            TranscriptError: ids that no answer can have, or an episode that is over.
        """
        ids = list(map(int, ids))
        ends = set(self._tokenizer.eos_ids)
        if self.done:
            raise TranscriptError("the episode is over: make another")
        if not 1 <= len(ids) <= self._budget.turn_tokens:
            raise TranscriptError(f"an answer has {len(ids)} ids: the budget of a turn is 1 to "
                                  f"{self._budget.turn_tokens}")
        if ends & set(ids[:-1]):
            raise TranscriptError("an answer goes on after its end-of-turn id: cut it there")
        self.transcript.act(ids)
        if ids[-1] not in ends:
            return self._end("cut", 0.0)
        try:
            step = self._env.step(self._tokenizer.decode(ids[:-1]))
        except Exception as error:
            return self._fail(error)
        if step.done:
            return self._end("done", float(step.reward))
        if len(self.transcript.turns) >= self._budget.turns:
            return self._end("turns", 0.0)
        self._observe(step.observation, first=False)

    def _observe(self, text: str, first: bool) -> None:
        ids = list(self._encode(text, first))
        own = self._budget.prompt_tokens if first else None
        limit = self._budget.observation_tokens if own is None else own
        if len(ids) > limit:
            ids = ids[:limit]
            self.transcript.cut_observations += 1
        # Only with room for a whole answer, so that every transcript ends in the model's token.
        room = self._budget.episode_tokens - len(self.transcript.ids) - len(ids)
        if room < self._budget.turn_tokens:
            self._end("tokens", 0.0)
        else:
            self.transcript.observe(ids)

    def _end(self, ending: str, reward: float | None) -> None:
        self.transcript.ending, self.transcript.reward = ending, reward

    def _fail(self, error: Exception) -> None:
        self.transcript.error = f"{type(error).__name__}: {error}"
        self._end("failed", None)


def play(episode: Episode, generate: Callable[[list[int]], Sequence[int]]) -> Transcript:
    """Plays one episode to its end with a policy that maps all ids so far to new ids."""
    while not episode.done:
        episode.respond(generate(episode.prompt))
    episode.transcript.check()
    return episode.transcript


def play_all(
    episodes: Sequence[Episode],
    generate: Callable[[list[list[int]]], Sequence[Sequence[int]]],
) -> list[Transcript]:
    """Plays many at once: each round asks for the answers of all episodes that are still open."""
    while open_now := [episode for episode in episodes if not episode.done]:
        answers = generate([episode.prompt for episode in open_now])
        for episode, answer in zip(open_now, answers, strict=True):
            episode.respond(answer)
    for episode in episodes:
        episode.transcript.check()
    return [episode.transcript for episode in episodes]
