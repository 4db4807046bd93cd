"""Problems, their order, their rewards and their tokens."""

import dataclasses
import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from trace_jax.tasks import (
    ByteTokenizer,
    JsonlProblems,
    Problem,
    ProblemSet,
    batch_indices,
    encode_answer,
    encode_prompts,
    extract_answer,
    reward,
    split_of,
)

SUM = ("chain_sum", 1.0, dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2))
SORT = (
    "number_sorting",
    1.0,
    dict(min_numbers=3, max_numbers=4, min_decimals=0, max_decimals=0, min_value=0, max_value=99),
)
SPELL = ("spell_backward", 2.0, dict(min_word_len=3, max_word_len=6))
MIX = (SUM, SORT, SPELL)


@pytest.fixture(scope="module")
def train():
    return ProblemSet(MIX, seed=3, split="train")


@pytest.fixture(scope="module")
def heldout():
    return ProblemSet(MIX, seed=3, split="heldout")


def text_of(problem):
    return problem.prompt, problem.answer, problem.source


# Tokenizer


def test_bytes_decode_together_and_never_crash():
    """BR-160: a character of several bytes may be spread over tokens."""
    tok = ByteTokenizer()
    assert tok.decode([240, 159, 152, 128]) == "😀"
    assert tok.decode([240, 159, 152]) == "\ufffd"
    assert tok.decode(np.array([104, 255, 105])) == "h\ufffdi"
    assert tok.decode([tok.bos_id, 104, 105, tok.eos_id, tok.pad_id]) == "hi"
    assert tok.decode(tok.encode("7 × 8 = 56 😀")) == "7 × 8 = 56 😀"


def test_vocabulary_holds_every_special_id_once():
    """BR-043: ends of text are a set, not a single id."""
    tok = ByteTokenizer()
    specials = {tok.pad_id, tok.bos_id, *tok.eos_ids}
    assert specials == {256, 257, 258} and tok.vocab_size == 259
    assert isinstance(tok.eos_ids, tuple) and tok.eos_id in tok.eos_ids


# Problems


def test_problem_depends_on_seed_and_index_alone(train):
    other = ProblemSet(MIX, seed=3, split="train")
    backwards = {i: text_of(other.problem(i)) for i in reversed(range(40))}
    assert [text_of(train.problem(i)) for i in range(40)] == [backwards[i] for i in range(40)]
    moved = ProblemSet(MIX, seed=4, split="train")
    same = sum(train.problem(i).prompt == moved.problem(i + k).prompt
               for i in range(1, 40) for k in (-1, 0, 1))
    assert same <= 3, "neighbouring seeds must not give one stream shifted by one"


def test_problem_is_the_same_in_another_process(train):
    code = (
        "from trace_jax.tasks import ProblemSet\n"
        f"p = ProblemSet({MIX!r}, seed=3, split='train')\n"
        "print([p.problem(i).prompt for i in range(8)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str([train.problem(i).prompt for i in range(8)])


def test_splits_share_no_question(train, heldout):
    """Held-out accuracy must not count questions that were trained on, whatever the seed."""
    trained = {train.problem(i).prompt for i in range(300)}
    held = {heldout.problem(i).prompt for i in range(300)}
    other = ProblemSet(MIX, seed=99, split="heldout")
    held |= {other.problem(i).prompt for i in range(100)}
    assert not trained & held
    assert all(split_of(p) == "heldout" for p in held)


def test_one_question_in_eight_is_held_out():
    share = np.mean([split_of(f"question {i}") == "heldout" for i in range(8000)])
    assert 0.11 < share < 0.14


def test_weights_set_the_mix(train):
    sources = [train.problem(i).source for i in range(400)]
    assert 0.42 < sources.count("spell_backward") / 400 < 0.58
    assert 0.18 < sources.count("chain_sum") / 400 < 0.32


def test_wording_is_short_and_gold_answers_score_one(train):
    for i in range(60):
        problem = train.problem(i)
        assert len(problem.prompt) < 48 and 1 <= len(problem.answer) <= 24
        assert reward(problem, problem.answer) == 1.0, problem
        assert reward(problem, f"  {problem.answer}\n") == 1.0


TEMPLATED = {
    "base_conversion": dict(min_base=2, max_base=4, min_value=1, max_value=255),
    "basic_arithmetic": dict(min_terms=2, max_terms=3, max_digits=1),
    "caesar_cipher": dict(min_words=3, max_words=4),
    "count_bits": dict(max_n=1023),
    "decimal_chain_sum": dict(max_terms=2, max_digits=1, max_decimal_places=1),
    "gcd": dict(max_value=60),
    "letter_counting": dict(min_words=2, max_words=3),
    "palindrome_generation": dict(max_length=6),
    "products": dict(max_digits=2),
    "simple_equations": dict(max_terms=2, max_value=9),
    "word_sorting": dict(min_words=3, max_words=3, max_word_length=4),
    "lcm": {},  # no template: the raw question
}


@pytest.mark.parametrize("name", TEMPLATED)
def test_every_template_words_questions_that_its_scorer_can_judge(name):
    problems = ProblemSet([(name, 1.0, TEMPLATED[name])], seed=0, split="train")
    seen = {problems.problem(i).prompt for i in range(12)}
    assert len(seen) >= 10
    for i in range(12):
        problem = problems.problem(i)
        assert len(problem.prompt) < 70 and "\n" not in problem.prompt
        assert reward(problem, problem.answer) == 1.0
        assert reward(problem, "zzz") == 0.0 and reward(problem, problem.answer + " 9") == 0.0


def test_a_matrix_is_worded_as_its_rows_and_answered_as_its_spiral():
    problem = ProblemSet([("spiral_matrix", 1.0, {"min_n": 3, "max_n": 3})], 0, "train").problem(0)
    first, *rows, last = problem.prompt.split("\n")
    (a, b, c), (d, e, f), (g, h, i) = (row.split() for row in rows)
    assert (first, last) == ("spiral", "=")
    assert problem.answer.split() == [a, b, c, f, i, h, g, d, e]
    assert reward(problem, problem.answer) == 1.0 and reward(problem, problem.answer[:-2]) == 0.0


@pytest.mark.parametrize(
    "datasets, split, message",
    [
        ([("chain_sums", 1, {})], "train", "did you mean chain_sum"),
        ([("chain_sum", 1, dict(terms=2))], "train", "terms"),
        ([("chain_sum", 1, dict(seed=2))], "train", "leave out seed"),
        ([("chain_sum", 0, {})], "train", "positive number"),
        ([("chain_sum", float("nan"), {})], "train", "positive number"),
        ([], "train", "at least one"),
        ([SUM], "test", "train, heldout"),
    ],
)
def test_bad_problem_sets_get_one_clear_line(datasets, split, message):
    with pytest.raises(ValueError, match=message) as caught:
        ProblemSet(datasets, seed=0, split=split)
    assert "\n" not in str(caught.value)


def test_a_split_without_questions_is_an_error_not_a_hang():
    tiny = [("count_bits", 1, dict(min_n=1, max_n=1))]
    empty = "train" if split_of("bits 1 =") == "heldout" else "heldout"
    with pytest.raises(ValueError, match=f"no {empty} question"):
        ProblemSet(tiny, seed=0, split=empty).problem(0)


# Order


def test_order_needs_only_the_step_and_visits_each_problem_once():
    """BR-136, BR-139: batches 6 to 10 after a stop at 5 are those of an unbroken run."""
    whole = [batch_indices(s, 4, seed=7, size=40) for s in range(10)]
    assert [batch_indices(s, 4, seed=7, size=40) for s in range(5, 10)] == whole[5:]
    assert sorted(sum(whole, [])) == list(range(40))
    assert batch_indices(10, 4, seed=7, size=40) != whole[0], "the next epoch has its own order"
    assert sorted(sum((batch_indices(s, 64, seed=7) for s in range(64, 128)), [])) == list(
        range(4096, 8192)
    )


def test_data_seed_changes_the_order_only():
    """BR-145."""
    a = sum((batch_indices(s, 64, seed=1) for s in range(64)), [])
    b = sum((batch_indices(s, 64, seed=2) for s in range(64)), [])
    assert a != b and sorted(a) == sorted(b)


def test_a_batch_may_cross_the_end_of_an_epoch():
    batch = batch_indices(1, 3, seed=0, size=4)
    assert len(batch) == 3 and set(batch) <= set(range(4))
    both = batch_indices(0, 3, seed=0, size=4) + batch
    assert sorted(both[:4]) == [0, 1, 2, 3]


# Rewards


def test_partial_credit_is_no_credit(train):
    spell = next(p for p in map(train.problem, range(50)) if p.source == "spell_backward")
    assert 0 < spell.scorer(spell.answer[:-1] + "!") < 1
    assert reward(spell, spell.answer[:-1] + "!") == 0.0


def test_sorted_numbers_must_be_the_numbers_asked_for(train):
    """The public scorer forgives an error of 1 in every number."""
    numbers = next(p for p in map(train.problem, range(50)) if p.source == "number_sorting")
    gold = [int(n) for n in numbers.answer.split()]
    up = gold == sorted(gold)
    near = sorted((gold[0] - 1, *gold[1:]) if up else (gold[0] + 1, *gold[1:]), reverse=not up)
    assert reward(numbers, " ".join(map(str, near))) == 0.0
    assert reward(numbers, " ".join(map(str, gold[::-1]))) == 0.0


def test_empty_and_truncated_responses_earn_nothing(train):
    problem = train.problem(0)
    assert [reward(problem, text) for text in ("", "  \n", "\\boxed{")] == [0.0, 0.0, 0.0]
    assert reward(problem, problem.answer, finished=False) == 0.0
    assert reward(Problem(0, "convert 0", "", "gold text lost"), "") == 0.0


@pytest.mark.parametrize(
    "text, gold, value",
    [
        ("<answer>\\boxed{42}</answer>", "42", 1.0),  # BR-121
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1.0),  # BR-116: cut at the first brace
        ("\\boxed{\\frac{1}{2}}", "\\frac{1", 0.0),
        ("\\boxed{42", "42", 0.0),
        ("It could be 7, 8 or 9.", "8", 0.0),  # BR-119
        ("8", "8", 1.0),
        ("think <answer>7</answer> no, <answer>8</answer>", "8", 1.0),
    ],
)
def test_answers_are_read_strictly(text, gold, value):
    """BR-116, BR-119, BR-121."""
    assert reward(Problem(0, "q", gold, "mine"), text) == value


def test_mixed_numbers_do_not_pass_as_their_whole_part(train):
    """BR-112."""
    total = next(p for p in map(train.problem, range(50)) if p.source == "chain_sum")
    assert reward(total, f"{total.answer} 2/3") == 0.0
    assert reward(total, f"{total.answer}.0") == 1.0


def test_only_the_response_is_scored():
    """BR-120: the prompt's own mention of the answer's format or value earns nothing."""
    problem = Problem(0, "write \\boxed{5}", "5", "mine")
    assert reward(problem, "\\boxed{6}") == 0.0 and extract_answer("six") == "six"


def test_an_outage_is_not_a_wrong_answer(train):
    """BR-129: unscored, so that the group drops the sample."""

    def raises(error):
        def scorer(text):
            raise error
        return dataclasses.replace(train.problem(0), scorer=scorer)

    assert reward(raises(TimeoutError("sandbox")), "1") is None
    assert reward(raises(RuntimeError("lost")), "1") is None
    assert reward(raises(ValueError("broken for every text")), "1") is None


def test_a_scorer_that_chokes_on_nonsense_gives_zero():
    """prime_factorization's scorer raises ValueError on text that is no product."""
    problem = ProblemSet([("prime_factorization", 1, {})], seed=0, split="train").problem(0)
    with pytest.raises(ValueError):
        problem.scorer("(((")
    assert reward(problem, "(((") == 0.0 and reward(problem, problem.answer) == 1.0


def test_scoring_in_a_thread_gives_the_same(train):
    """BR-122: timeouts by signal fail off the main thread."""
    problems = [train.problem(i) for i in range(20)]
    out = []
    worker = threading.Thread(target=lambda: out.extend(reward(p, p.answer) for p in problems))
    worker.start()
    worker.join()
    assert out == [1.0] * 20


# Files and tokens


def test_rows_of_a_file_become_problems(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"say {i}\u2028", "answer": str(i)} for i in range(64)]
    path.write_text("\n\n".join(json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8")
    everything = JsonlProblems(path)
    assert len(everything) == 64 and reward(everything.problem(5), "5") == 1.0
    parts = [JsonlProblems(path, split) for split in ("train", "heldout")]
    assert sum(map(len, parts)) == 64 and min(map(len, parts)) > 0
    with pytest.raises(IndexError, match="64 rows"):
        everything.problem(64)


@pytest.mark.parametrize("bad", ["{", "[]", '{"prompt": "x"}', '{"prompt": "x", "answer": 3}'])
def test_a_bad_row_is_named_by_its_line(tmp_path, bad):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n\n' + bad + "\n")
    with pytest.raises(ValueError, match="line 3") as caught:
        JsonlProblems(path)
    assert "\n" not in str(caught.value)


def test_a_missing_or_empty_file_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        JsonlProblems(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no usable rows"):
        JsonlProblems(tmp_path / "empty.jsonl")


def test_over_long_prompts_are_dropped_whole():
    """BR-158, BR-162: counted, never cut."""
    tok = ByteTokenizer()
    texts = ["ab", "a" * 8, "é", "a" * 7]
    problems = [Problem(i, text, "x", "mine") for i, text in enumerate(texts)]
    tokens, lengths, dropped = encode_prompts(problems, tok, max_prompt=8)
    assert tokens.dtype == lengths.dtype == np.int32 and tokens.shape == (3, 8)
    assert dropped == [problems[1]] and lengths.tolist() == [3, 3, 8]
    assert tokens[0].tolist() == [tok.bos_id, 97, 98] + [tok.pad_id] * 5
    assert tokens[1].tolist()[:4] == [tok.bos_id, 195, 169, tok.pad_id]
    none, no_lengths, all_dropped = encode_prompts(problems, tok, max_prompt=1)
    assert none.shape == (0, 1) and no_lengths.shape == (0,) and len(all_dropped) == 4


def test_warm_start_target_ends_in_eos():
    tok = ByteTokenizer()
    assert encode_answer(Problem(0, "1 + 1 =", "2", "mine"), tok) == [50, tok.eos_id]


def test_importing_tasks_does_not_import_reasoning_gym():
    code = "import sys, trace_jax.tasks; sys.exit('reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
