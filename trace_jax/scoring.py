"""Problems to prompts, responses to rewards."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from trace_jax.config import Config, ConfigError, TaskConfig, require
from trace_jax.parallel import from_first, is_first, to_host
from trace_jax.rollout import Rollout
from trace_jax.tasks import (
    Budget,
    Problem,
    SandboxUnavailable,
    Source,
    Transcript,
    batch_indices,
    encode_prompts,
    make_source,
    reward,
    size_of,
)
from trace_jax.tasks.tokenizer import Tokenizer

SLOW_SCORERS = os.cpu_count() or 1  # programs that are judged at a time


def problem_set(config: Config, split: str) -> Source:
    """The problems of a split.

    Raises:
      ConfigError: data that is missing, parameters that its kind does not take, or code
        that cannot be isolated on this machine.
    """
    task = config.task
    rows = [(name, weight, dict(params)) for name, weight, params in task.datasets]
    try:
        return make_source(task.kind, dict(task.params), split, rows)
    except (ValueError, SandboxUnavailable) as error:
        raise ConfigError(f"task.kind {task.kind!r}: {error}") from error


def choose(problems: Source, step: int, count: int, seed: int) -> list[Problem]:
    """The problems of one step, from (data seed, step) alone."""
    return [problems.problem(i) for i in batch_indices(step, count, seed, size_of(problems))]


def first_problems(problems: Source, count: int) -> list[Problem]:
    """Problems 0 to count - 1, for evaluation. ConfigError when there are fewer."""
    size = size_of(problems)
    require(
        size is None or count <= size,
        f"eval.problems is {count} and {size} are held out; write {size} or less",
    )
    return [problems.problem(i) for i in range(count)]


def budget(task: TaskConfig, prompt: int) -> Budget:
    """Of an episode whose prompt has so many tokens."""
    return Budget(
        turn_tokens=task.turn_tokens,
        observation_tokens=task.observation_tokens,
        episode_tokens=prompt + task.max_response,
        turns=task.turns,
        prompt_tokens=prompt,
    )


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A batch of P prompts. Slots whose prompt was dropped repeat another and are not `live`."""

    tokens: np.ndarray  # int32 [P, max_prompt]
    lengths: np.ndarray  # int32 [P]
    problems: list[Problem]
    live: np.ndarray  # bool [P]

    @property
    def dropped(self) -> int:
        return int((~self.live).sum())


def make_prompts(problems: Sequence[Problem], tokenizer: Tokenizer, config: Config) -> Prompts:
    """Encodes prompts at a fixed batch size; over-long ones are dropped and counted.

    Raises:
      ConfigError: not one prompt fits the budget.
    """
    tokens, lengths, dropped = encode_prompts(problems, tokenizer, config.task.max_prompt)
    lost = {id(p) for p in dropped}
    kept = [p for p in problems if id(p) not in lost]
    if not kept:
        raise ConfigError(
            f"task.max_prompt is {config.task.max_prompt}: all {len(problems)} prompts of a step "
            "are longer; write a larger budget"
        )
    fill = len(problems) - len(kept)
    live = np.arange(len(problems)) < len(kept)
    repeat = lambda a: np.concatenate([a, np.repeat(a[:1], fill, axis=0)])
    return Prompts(repeat(tokens), repeat(lengths), kept + kept[:1] * fill, live)


def responses(rollout: Rollout, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """(text, finished) of every row; only sampled tokens, never the prompt."""
    tokens, start, end, finished = (
        to_host(a)
        for a in (rollout.tokens, rollout.prompt_length, rollout.length, rollout.finished)
    )
    rows = zip(tokens, start, end, finished, strict=True)
    return [(tokenizer.decode(row[a:b].tolist()), bool(f)) for row, a, b, f in rows]


def score(rollout: Rollout, prompts: Prompts, tokenizer: Tokenizer, samples: int):
    """Rewards FP32 [P, samples] and valid bool [P, samples] of single answers.

    A response whose scorer failed, or whose prompt was dropped, is not valid: it has
    no reward, which is not a reward of 0.
    """
    texts = responses(rollout, tokenizer)
    answers = [(prompts.problems[i // samples], *answer) for i, answer in enumerate(texts)]
    # A verdict may hang on the clock of a machine, so one process gives it.
    values = _rewards(answers) if is_first() else [None] * len(answers)
    return from_first(_laid_out(values, prompts, samples))


def _rewards(answers: list[tuple[Problem, str, bool]]) -> list[float | None]:
    """Reward of each. Slow scorers judge equal answers once, and several side by side."""
    if not any(getattr(p.scorer, "slow", False) for p, *_ in answers):
        return [reward(*answer) for answer in answers]
    keys = [(id(p), text, done) for p, text, done in answers]
    distinct = dict(zip(keys, answers, strict=True))
    with concurrent.futures.ThreadPoolExecutor(SLOW_SCORERS) as pool:
        values = pool.map(lambda answer: reward(*answer), distinct.values())
        known = dict(zip(distinct, values, strict=True))
    return [known[key] for key in keys]


def episode_rewards(transcripts: Sequence[Transcript], prompts: Prompts, samples: int):
    """As `score`, of episodes: one whose environment failed is not valid."""
    return _laid_out([t.reward for t in transcripts], prompts, samples)


def _laid_out(values: Sequence[float | None], prompts: Prompts, samples: int):
    scored = np.array([v is not None for v in values]).reshape(-1, samples)
    rewards = np.array([v or 0.0 for v in values], np.float32).reshape(-1, samples)
    return rewards, scored & prompts.live[:, None]
