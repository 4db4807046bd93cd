"""Episodes as problems: the first observation is the prompt, a way through is the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trace_jax.tasks.environments import Environment, make_environment
from trace_jax.tasks.multiturn import Budget, Episode, Transcript
from trace_jax.tasks.problems import MAX_TRIES, Problem, check_split, split_of, stable_hash

PROMPT_END = "\n> "  # ends what the environment says; the model's action follows


@dataclass(frozen=True)
class EpisodeProblem(Problem):
    """A problem of several turns. `answer` holds the actions of a solution, one a line."""

    seed: int = 0
    params: tuple = ()

    def environment(self) -> Environment:
        return make_environment(self.source, **dict(self.params))

    def episode(self, tokenizer, budget: Budget) -> Episode:
        """A fresh episode whose first ids are the tokenizer's prompt."""

        def encode(text: str, first: bool) -> list[int]:
            if first:
                return tokenizer.prompt_ids(text + PROMPT_END)
            return tokenizer.turn_ids(text + PROMPT_END)

        return Episode(self.environment(), self.seed, tokenizer, budget, encode)


class EpisodeSet:
    """Unlimited episodes of one environment.

    Args:
        name, params: of the environment.
        seed: the stream of episodes.
        split: "train" or "heldout", by a hash of first observation and solution, so that a
            small environment, too, holds out what training never meets.

    Raises:
        ValueError: unknown environment, parameter or split.
    """

    def __init__(self, name: str, params: Mapping, seed: int, split: str):
        check_split(split)
        self._env = make_environment(name, **params)
        self.name, self.params = name, tuple(params.items())
        self.seed, self.split = int(seed), split

    def problem(self, i: int) -> EpisodeProblem:
        """Episode `i`, whatever was asked before. ValueError when the split is empty."""
        if i < 0:
            raise ValueError(f"problem index is {i}: write 0 or more")
        for attempt in range(MAX_TRIES):
            seed = stable_hash("episode", self.seed, i, attempt) % 2**31
            first = self._env.reset(seed)
            answer = "\n".join(self._env.solution())
            if split_of(f"{first}\n{answer}") == self.split:
                prompt = first + PROMPT_END
                return EpisodeProblem(
                    i, prompt, answer, self.name, None, seed=seed, params=self.params
                )
        raise ValueError(f"{self.name} with {dict(self.params)} has no {self.split} episode")


def demonstration(problem: EpisodeProblem, tokenizer, budget: Budget) -> Transcript:
    """The transcript of the problem's answer being played, for a warm start; empty if that
    does not fit the budget.
    """
    episode = problem.episode(tokenizer, budget)
    for action in problem.answer.split("\n"):
        ids = [*tokenizer.encode(action), tokenizer.eos_ids[0]]
        if episode.transcript.ending == "done":
            break
        if episode.done or len(ids) > budget.turn_tokens:
            return Transcript()
        episode.respond(ids)
    return episode.transcript
