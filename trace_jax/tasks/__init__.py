"""Prompts and verifiable rewards. This room knows no model."""

from trace_jax.tasks.batches import batch_indices, encode_answer, encode_prompt, encode_prompts
from trace_jax.tasks.coding import CodeTests, CodingProblems, human_eval, jsonl_coding
from trace_jax.tasks.coding_examples import ExamplePrograms
from trace_jax.tasks.environments import ENVIRONMENTS, Environment, Step, make_environment
from trace_jax.tasks.episodes import EpisodeProblem, EpisodeSet, demonstration
from trace_jax.tasks.jsonl import JsonlProblems
from trace_jax.tasks.math_answers import MathAnswer, same_answer
from trace_jax.tasks.math_process import MathCheckError
from trace_jax.tasks.multiturn import (
    Budget,
    Episode,
    Transcript,
    TranscriptError,
    play,
    play_all,
)
from trace_jax.tasks.problems import Problem, ProblemSet, split_of
from trace_jax.tasks.rewards import extract_answer, reward
from trace_jax.tasks.sandbox import Limits, SandboxError, SandboxUnavailable, run_program
from trace_jax.tasks.sources import TASK_KINDS, Source, make_source, size_of
from trace_jax.tasks.tfds_sets import PreparedProblems, gsm8k, lbpp, math_dataset
from trace_jax.tasks.tokenizer import ByteTokenizer

__all__ = [
    "ENVIRONMENTS",
    "TASK_KINDS",
    "Budget",
    "ByteTokenizer",
    "CodeTests",
    "CodingProblems",
    "Environment",
    "Episode",
    "EpisodeProblem",
    "EpisodeSet",
    "ExamplePrograms",
    "JsonlProblems",
    "Limits",
    "MathAnswer",
    "MathCheckError",
    "PreparedProblems",
    "Problem",
    "ProblemSet",
    "SandboxError",
    "SandboxUnavailable",
    "Source",
    "Step",
    "Transcript",
    "TranscriptError",
    "batch_indices",
    "demonstration",
    "encode_answer",
    "encode_prompt",
    "encode_prompts",
    "extract_answer",
    "gsm8k",
    "human_eval",
    "jsonl_coding",
    "lbpp",
    "make_environment",
    "make_source",
    "math_dataset",
    "play",
    "play_all",
    "reward",
    "run_program",
    "same_answer",
    "size_of",
    "split_of",
]
