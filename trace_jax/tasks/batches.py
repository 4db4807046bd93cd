"""Which problems a step reads, and how they become tokens.

Order is a function of (data seed, step) alone, so a resumed run needs no iterator state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from trace_jax.tasks.problems import Problem, stable_hash
from trace_jax.tasks.tokenizer import Tokenizer

ORDER_BLOCK = 4096  # an unlimited set is visited block by block, each in its own shuffled order


def batch_indices(
    step: int, prompts_per_step: int, seed: int, size: int | None = None
) -> list[int]:
    """Problem indices of one step, from (data seed, step) alone.

    Each epoch of `size` problems is visited once, in an order of its own; without a size the
    stream is cut in blocks, so another seed visits the same problems in another order.
    """
    if step < 0 or prompts_per_step < 1 or (size is not None and size < 1):
        raise ValueError("batch_indices needs step >= 0, prompts_per_step >= 1 and size >= 1")
    block = size or ORDER_BLOCK
    out = []
    for position in range(step * prompts_per_step, (step + 1) * prompts_per_step):
        epoch, place = divmod(position, block)
        out.append(_shuffled(seed, epoch, block)[place] + (0 if size else epoch * block))
    return out


@functools.lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, block: int) -> tuple[int, ...]:
    # Sorting by our own hash keeps the order stable across NumPy and Python versions.
    return tuple(sorted(range(block), key=lambda i: stable_hash("order", seed, epoch, i)))


def encode_prompt(problem: Problem, tokenizer: Tokenizer) -> list[int]:
    """The prompt as a conversation's first turn: what the rollout and the warm start both read."""
    return tokenizer.prompt_ids(problem.prompt)


def encode_answer(problem: Problem, tokenizer: Tokenizer) -> list[int]:
    """The gold answer and EOS: the target of the warm start."""
    return [*tokenizer.encode(problem.answer), tokenizer.eos_ids[0]]


def encode_prompts(
    problems: Sequence[Problem], tokenizer: Tokenizer, max_prompt: int
) -> tuple[np.ndarray, np.ndarray, list[Problem]]:
    """Right-padded prompts. Over-long ones are left out and returned, never cut.

    Returns:
        tokens int32 [P, max_prompt] and lengths int32 [P] of the P prompts that fit (every id
        counted, in order), and the dropped problems.
    """
    rows, dropped = [], []
    for problem in problems:
        ids = encode_prompt(problem, tokenizer)
        if len(ids) <= max_prompt:
            rows.append(ids)
        else:
            dropped.append(problem)
    tokens = np.full((len(rows), max_prompt), tokenizer.pad_id, np.int32)
    for r, ids in enumerate(rows):
        tokens[r, : len(ids)] = ids
    return tokens, np.array([len(ids) for ids in rows], np.int32), dropped
