"""Unlimited verifiable problems from reasoning_gym, each a pure function of (seed, index).

Some of its scorers evaluate the answer as an expression (countdown, puzzle24): keep those for
sandboxed runs.
"""

from __future__ import annotations

import bisect
import difflib
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from trace_jax.tasks.templates import RAW, TEMPLATES, Template

SPLITS = ("train", "heldout")
HELDOUT_ONE_IN = 8
MAX_TRIES = 2000  # a large dataset misses the held-out split this often once in 10^115


@dataclass(frozen=True)
class Problem:
    """One question. `scorer` maps an answer's text to a score; None means an exact match."""

    index: int
    prompt: str
    answer: str
    source: str
    scorer: Callable[[str], float] | None = field(default=None, compare=False, repr=False)


def stable_hash(*parts: Any) -> int:
    """A 64-bit hash that is the same in every process, unlike Python's own."""
    text = json.dumps(parts, ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def split_of(prompt: str) -> str:
    """The split that owns a question, by its text alone: whatever the seed, splits never meet."""
    return "heldout" if stable_hash("split", prompt) % HELDOUT_ONE_IN == 0 else "train"


def check_split(split: str | None) -> None:
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}: write one of {', '.join(SPLITS)}")


def _make_dataset(name: str, params: Mapping[str, Any]) -> Any:
    """A reasoning_gym dataset; raises ValueError for an unknown name or parameter."""
    from reasoning_gym.factory import DATASETS, create_dataset  # takes a second: only when used

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f": did you mean {near[0]}?" if near else ": see reasoning_gym's gallery for names"
        raise ValueError(f"reasoning_gym has no dataset {name!r}{hint}")
    if taken := {"seed", "size"} & set(params):
        raise ValueError(f"{name}: leave out {', '.join(sorted(taken))}, the problem set sets it")
    try:
        return create_dataset(name, seed=0, size=2, **params)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"{name}: parameters {dict(params)} are refused: {error}") from error


def _gym_score(dataset: Any, entry: Mapping, template: Template, gold: str, text: str) -> float:
    if template.unique and text.split() != gold.split():
        return 0.0
    return dataset.score_answer(template.parse(text), entry)


class ProblemSet:
    """Unlimited problems from reasoning_gym datasets, by seed and index.

    Args:
        datasets: (name, weight, params) rows; params set the difficulty.
        seed: the stream of problems.
        split: "train" or "heldout"; 1 question in 8 is held out, by a hash of its text.

    Raises:
        ValueError: unknown dataset, parameter or split; a weight that is no positive number.
    """

    def __init__(self, datasets: Sequence[tuple[str, float, Mapping]], seed: int, split: str):
        check_split(split)
        if not datasets:
            raise ValueError("no datasets: write at least one (name, weight, params) row")
        for name, weight, _ in datasets:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"{name}: weight is {weight}: write a positive number")
        self.seed, self.split = int(seed), split
        self._names = [name for name, _, _ in datasets]
        self._params = [dict(params) for _, _, params in datasets]
        self._bounds = list(accumulate(float(weight) for _, weight, _ in datasets))
        self._datasets = [_make_dataset(name, params) for name, _, params in datasets]

    def problem(self, i: int) -> Problem:
        """Problem `i`, whatever was asked before. Raises ValueError when the split is empty."""
        if i < 0:
            raise ValueError(f"problem index is {i}: write 0 or more")
        draw = stable_hash("dataset", self.seed, i) / 2**64 * self._bounds[-1]
        d = min(bisect.bisect_right(self._bounds, draw), len(self._bounds) - 1)
        name, dataset = self._names[d], self._datasets[d]
        template = TEMPLATES.get(name, RAW)
        for attempt in range(MAX_TRIES):
            # Hashed, because reasoning_gym seeds by seed + index: neighbours would overlap.
            place = stable_hash("entry", self.seed, d, i, attempt) % 2**31
            try:
                entry = dataset[place]
            except IndexError as error:
                raise ValueError(f"{name} has no free indexing: choose another dataset") from error
            prompt = template.prompt(entry)
            if split_of(prompt) == self.split:
                gold = template.answer(entry)
                score = functools.partial(_gym_score, dataset, entry, template, gold)
                return Problem(i, prompt, gold, name, score)
        raise ValueError(f"{name} with {self._params[d]} has no {self.split} question: widen it")
