"""Prompts and verifiable rewards. This room knows no model."""

from trace_jax.tasks.batches import batch_indices, encode_answer, encode_prompt, encode_prompts
from trace_jax.tasks.jsonl import JsonlProblems
from trace_jax.tasks.problems import Problem, ProblemSet, split_of
from trace_jax.tasks.rewards import extract_answer, reward
from trace_jax.tasks.tokenizer import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "JsonlProblems",
    "Problem",
    "ProblemSet",
    "batch_indices",
    "encode_answer",
    "encode_prompt",
    "encode_prompts",
    "extract_answer",
    "reward",
    "split_of",
]
