"""Where a run's problems come from: one name a kind, one way to ask for problem `i`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trace_jax.tasks.coding import human_eval, jsonl_coding
from trace_jax.tasks.coding_examples import ExamplePrograms
from trace_jax.tasks.environments import ENVIRONMENTS
from trace_jax.tasks.episodes import EpisodeSet
from trace_jax.tasks.jsonl import JsonlProblems
from trace_jax.tasks.problems import Problem, ProblemSet
from trace_jax.tasks.tfds_sets import gsm8k, lbpp, math_dataset

PROBLEM_SEED = 0  # which problems exist; the data seed only orders them
OWN_SPLITS = {"train": "train", "heldout": "test"}  # of sets that come with a test part


class Source(Protocol):
    """Problems by index; one that has an end has a length."""

    def problem(self, i: int) -> Problem: ...


def _gsm8k(split: str, **params) -> Source:
    return gsm8k(OWN_SPLITS[split], **params)


def _math_dataset(split: str, category: str, **params) -> Source:
    return math_dataset(category, OWN_SPLITS[split], **params)


def _examples(split: str, difficulty: int = 1, **params) -> Source:
    return ExamplePrograms(PROBLEM_SEED, split, difficulty, **params)


# kind: (split, **params) to problems. Rows without parts of their own are split by their text.
SOURCES: dict[str, Callable[..., Source]] = {
    "gsm8k": _gsm8k,
    "math_dataset": _math_dataset,
    "jsonl": lambda split, path: JsonlProblems(path, split),
    "lbpp": lambda split, **params: lbpp(part=split, **params),
    "human_eval": lambda split, **params: human_eval(split=split, **params),
    "coding_jsonl": lambda split, path, **params: jsonl_coding(path, split=split, **params),
    "examples": _examples,
}
TASK_KINDS = ("reasoning", *SOURCES, *ENVIRONMENTS)


def make_source(
    kind: str, params: Mapping, split: str, datasets: Sequence[tuple[str, float, Mapping]] = ()
) -> Source:
    """Problems of one kind.

    Args:
        kind: one of TASK_KINDS; environments give problems of several turns.
        params: of the kind: `path` of a file, `category` of math_dataset, `data_dir` of a TFDS
            set, `difficulty` of examples, or an environment's own.
        split: "train" or "heldout".
        datasets: rows for "reasoning", see ProblemSet.

    Raises:
        ValueError: unknown kind, parameters that it does not take, data that is not there.
        SandboxUnavailable: code cannot be isolated on this machine.
    """
    if kind == "reasoning":
        return ProblemSet(datasets, PROBLEM_SEED, split)
    if kind in ENVIRONMENTS:
        return EpisodeSet(kind, dict(params), PROBLEM_SEED, split)
    if kind not in SOURCES:
        near = difflib.get_close_matches(kind, TASK_KINDS, n=1) or TASK_KINDS
        raise ValueError(f"there are no problems of kind {kind!r}: write {' or '.join(near)}")
    try:
        return SOURCES[kind](split, **params)
    except TypeError as error:
        raise ValueError(f"{kind}: parameters {dict(params)} are refused: {error}") from error


def size_of(source: Source) -> int | None:
    """How many problems there are; None where there is no end."""
    return len(source) if hasattr(source, "__len__") else None
