"""Prompts and rewards: budgets, dropped prompts, outages, and what text is scored."""

import dataclasses

import numpy as np
import pytest

from trace_jax import scoring
from trace_jax.config import Config, ConfigError, TaskConfig
from trace_jax.model import ModelConfig
from trace_jax.rl.advantages import group_advantages
from trace_jax.rollout import Rollout
from trace_jax.scoring import make_prompts, problem_set, responses, score
from trace_jax.tasks import ByteTokenizer, Problem

TOKENIZER = ByteTokenizer()
MODEL = ModelConfig(
    vocab_size=259,
    num_layers=2,
    hidden=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    expert_dim=32,
)
CONFIG = Config(model=MODEL, task=TaskConfig(max_prompt=6, max_response=8))


def problems(*prompts: str) -> list[Problem]:
    return [Problem(i, prompt, f"answer {i}", "test") for i, prompt in enumerate(prompts)]


def rollout_of(rows, width: int = 16) -> Rollout:
    """A rollout of (prompt, response ids, finished) rows; only its host-side fields."""
    tokens = np.full((len(rows), width), 90, np.int32)  # "Z" beyond the end: never to be read
    start, end = [], []
    for i, (prompt, ids, _) in enumerate(rows):
        row = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt), *ids]
        tokens[i, : len(row)] = row
        start.append(len(row) - len(ids))
        end.append(len(row))
    finished = np.array([done for *_, done in rows])
    empty = dict.fromkeys(f.name for f in dataclasses.fields(Rollout))
    fields = dict(
        tokens=tokens, prompt_length=np.array(start), length=np.array(end), finished=finished
    )
    return Rollout(**(empty | fields))


def answer(text: str, done: bool = True):
    return [*TOKENIZER.encode(text), *([TOKENIZER.eos_id] if done else [])]


# --- prompts -------------------------------------------------------------------------


def test_prompts_longer_than_the_budget_are_dropped_and_counted_never_cut():
    """BR-158: filtered before the rollout, counted; BR-162: a full budget leaves no sample."""
    prompts = make_prompts(problems("12345", "123456", "1", "1234567"), TOKENIZER, CONFIG)
    assert prompts.dropped == 2  # five bytes and BOS fill the six tokens; six bytes do not fit
    np.testing.assert_array_equal(prompts.live, [True, True, False, False])
    np.testing.assert_array_equal(prompts.lengths, [6, 2, 6, 6])
    assert prompts.tokens.shape == (4, 6), "the batch keeps its size"
    assert [p.prompt for p in prompts.problems[:2]] == ["12345", "1"]
    kept = {tuple(row[:n]) for row, n in zip(prompts.tokens, prompts.lengths, strict=True)}
    whole = {(TOKENIZER.bos_id, *TOKENIZER.encode(text)) for text in ("12345", "1")}
    assert kept == whole, "no prompt was cut short"


def test_a_step_whose_prompts_all_exceed_the_budget_is_refused():
    with pytest.raises(ConfigError, match=r"^task\.max_prompt is 6: all 2 prompts of a step"):
        make_prompts(problems("1234567", "abcdefgh"), TOKENIZER, CONFIG)


def test_a_dropped_prompt_gives_no_valid_sample_and_no_advantage():
    """BR-162: dropped means excluded; the loss stays finite."""
    prompts = make_prompts(problems("a", "too long by far"), TOKENIZER, CONFIG)
    right = answer("answer 0")
    rows = [("a", right, True), ("a", answer("no"), True), ("a", right, True), ("a", [], True)]
    rewards, valid = score(rollout_of(rows), prompts, TOKENIZER, 2)
    np.testing.assert_array_equal(valid, [[True, True], [False, False]])
    advantages = np.asarray(group_advantages(rewards, valid, scale="std"))
    np.testing.assert_allclose(advantages[0], [1, -1], rtol=1e-4)
    np.testing.assert_array_equal(advantages[1], [0, 0])


def test_problem_set_reads_the_datasets_of_the_config():
    task = TaskConfig(datasets=(("gcd", 1.0, (("max_value", 9),)),))
    config = dataclasses.replace(CONFIG, task=task)
    train, heldout = problem_set(config, "train"), problem_set(config, "heldout")
    assert train.problem(0).source == "gcd" and train.problem(0).prompt.startswith("gcd ")
    assert train.problem(0).prompt != heldout.problem(0).prompt


# --- rewards -------------------------------------------------------------------------


@pytest.fixture
def two_prompts():
    return make_prompts(problems("p", "q"), TOKENIZER, CONFIG)


def test_rewards_are_laid_out_by_prompt_and_sample(two_prompts):
    rows = [
        ("p", answer("answer 0"), True),
        ("p", answer("answer 1"), True),
        ("q", answer("answer 0"), True),
        ("q", answer("answer 1"), True),
    ]
    rewards, valid = score(rollout_of(rows), two_prompts, TOKENIZER, 2)
    assert valid.all() and rewards.dtype == np.float32
    np.testing.assert_array_equal(rewards, [[1, 0], [0, 1]])


def test_groups_are_prompt_instances_even_where_two_have_one_text():
    """BR-065: [1, 0, 0, 0] has its own baseline, whatever the other group of that text earned."""
    twice = make_prompts([Problem(i, "p", "answer 0", "test") for i in (0, 1)], TOKENIZER, CONFIG)
    right, wrong = (("p", answer(f"answer {i}"), True) for i in (0, 1))
    rows = [right, wrong, wrong, wrong, right, right, right, wrong]
    rewards, valid = score(rollout_of(rows), twice, TOKENIZER, 4)
    advantages = np.asarray(group_advantages(rewards, valid, scale="std"))
    np.testing.assert_allclose(advantages[0], [1.732, -0.577, -0.577, -0.577], atol=1e-3)
    np.testing.assert_allclose(advantages[1], [0.577, 0.577, 0.577, -1.732], atol=1e-3)


def test_a_response_cut_off_by_the_budget_earns_nothing(two_prompts):
    rows = [("p", answer("answer 0", done=False), False), ("p", answer("answer 0"), True)] * 2
    rewards, valid = score(rollout_of(rows), two_prompts, TOKENIZER, 2)
    assert valid.all()
    np.testing.assert_array_equal(rewards[0], [0, 1])


def test_an_outage_of_the_scorer_is_no_reward_of_zero(monkeypatch, two_prompts):
    """BR-129: the failed sample leaves its group; the others are judged against each other."""
    real = scoring.reward
    down = iter([False, True, False, False])
    monkeypatch.setattr(scoring, "reward", lambda *a: None if next(down) else real(*a))
    rows = [("p", answer("answer 0"), True), ("p", answer("answer 0"), True)] * 2
    rewards, valid = score(rollout_of(rows), two_prompts, TOKENIZER, 2)
    np.testing.assert_array_equal(valid, [[True, False], [True, True]])
    advantages = np.asarray(group_advantages(rewards, valid, scale="std"))
    assert advantages[0].tolist() == [0, 0], "wrong: [1, -1], as if the outage had scored 0"


def test_text_of_the_prompt_is_never_scored(monkeypatch, two_prompts):
    """BR-120: an answer that stands in the prompt earns nothing."""
    seen = []
    monkeypatch.setattr(scoring, "reward", lambda problem, text, done: seen.append(text) or 0.0)
    rows = [("\\boxed{7}", answer("no"), True), ("answer 0", [], True)] * 2
    score(rollout_of(rows), two_prompts, TOKENIZER, 2)
    assert seen == ["no", ""] * 2


def test_characters_of_several_bytes_are_decoded_once():
    """BR-160: the bytes of one character in several tokens; invalid bytes do not crash."""
    rows = [("p", [240, 159, 152, 128, TOKENIZER.eos_id], True), ("p", [65, 240, 159], False)]
    (emoji, broken) = responses(rollout_of(rows), TOKENIZER)
    assert emoji == ("\N{GRINNING FACE}", True)
    assert broken[0].startswith("A") and broken[0][1:].strip("\ufffd") == "" and not broken[1]


def test_nothing_beyond_the_end_of_a_row_is_read():
    assert responses(rollout_of([("p", [72, 105], False)]), TOKENIZER) == [("Hi", False)]
