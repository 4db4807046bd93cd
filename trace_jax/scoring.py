"""Problems to prompts, responses to rewards."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from trace_jax.config import Config, ConfigError
from trace_jax.rollout import Rollout
from trace_jax.tasks import Problem, ProblemSet, encode_prompts, reward
from trace_jax.tasks.tokenizer import Tokenizer

PROBLEM_SEED = 0  # which problems exist; config.data_seed only orders them


def problem_set(config: Config, split: str) -> ProblemSet:
    rows = [(name, weight, dict(params)) for name, weight, params in config.task.datasets]
    return ProblemSet(rows, PROBLEM_SEED, split)


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
        np.asarray(a)
        for a in (rollout.tokens, rollout.prompt_length, rollout.length, rollout.finished)
    )
    rows = zip(tokens, start, end, finished, strict=True)
    return [(tokenizer.decode(row[a:b].tolist()), bool(f)) for row, a, b, f in rows]


def score(rollout: Rollout, prompts: Prompts, tokenizer: Tokenizer, samples: int):
    """Rewards FP32 [P, samples] and valid bool [P, samples].

    A response whose scorer failed, or whose prompt was dropped, is not valid: it has
    no reward, which is not a reward of 0.
    """
    texts = responses(rollout, tokenizer)
    values = [
        reward(prompts.problems[i // samples], text, finished)
        for i, (text, finished) in enumerate(texts)
    ]
    scored = np.array([v is not None for v in values]).reshape(-1, samples)
    rewards = np.array([v or 0.0 for v in values], np.float32).reshape(-1, samples)
    return rewards, scored & prompts.live[:, None]
