"""Mathematical answers: what counts as the same, what counts as an answer, and outages."""

import os
import subprocess
import sys
import threading
import time

import pytest

from trace_jax.tasks import Problem, reward
from trace_jax.tasks import math_process as process_module
from trace_jax.tasks.math_answers import (
    MathAnswer,
    final_answer,
    gsm8k_answer,
    number,
    same_answer,
)
from trace_jax.tasks.math_process import MathCheckError, MathProcess

LONG = (
    "First 12 + 30 = 42, then we add 31. Step 2: check 7, 8 and 9.\n"
    "So there are 5 rows of 10.\n\nFinal Answer: **73**"
)


def value(gold, text, **options):
    return reward(Problem(0, "q", gold, "mine", MathAnswer(gold, **options)), text)


@pytest.fixture(scope="module")
def running():
    """One process for all tests: starting it takes a second."""
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    made = MathProcess(timeout=20.0)
    yield made
    made.close()


@pytest.fixture
def process(running):
    running.timeout = 20.0
    return running


# Numbers


@pytest.mark.parametrize(
    "text, parts",
    [
        ("7", (7, 1)), ("-7", (-7, 1)), ("- 7", (-7, 1)), ("+7", (7, 1)), ("007", (7, 1)),
        ("0.50", (1, 2)), (".5", (1, 2)), ("1,234,567.5", (2469135, 2)), ("1.5e3", (1500, 1)),
        ("$18", (18, 1)), ("\\$18", (18, 1)), ("8/3", (8, 3)), ("-8 / 3", (-8, 3)),
        ("2 2/3", (8, 3)), ("-2 2/3", (-8, 3)), ("\\frac{1}{2}", (1, 2)),
        ("-\\dfrac{1}{2}", (-1, 2)), ("2\\frac{2}{3}", (8, 3)), ("0 1/2", (1, 2)),
    ],
)  # fmt: skip
def test_numbers_are_read_exactly(text, parts):
    found = number(text)
    assert (found.numerator, found.denominator) == parts


@pytest.mark.parametrize("text", ["", "-", ".", "4 10/3", "2 3/3", "1/0", "12,34", "1 2", "7.",
                                  "1,2", "seven", "7 apples", "1e9999", "1/2/3", "2-1"])
def test_what_is_no_number_is_not_read_in_part(text):
    assert number(text) is None


@pytest.mark.parametrize(
    "gold, answer, right",
    [
        ("2", "2 2/3", 0), ("10", "4 10/3", 0), ("8/3", "2 2/3", 1), ("8/3", "2\\frac{2}{3}", 1),
        ("10", "4\\frac{10}{3}", 0), ("22/3", "4 10/3", 0),
    ],
)  # fmt: skip
def test_a_mixed_number_is_its_sum(gold, answer, right):
    """BR-112."""
    assert value(gold, f"The answer is {answer}", strict=False) == right
    assert value(gold, f"The answer is {answer}.\n", strict=False) == right
    assert value(gold, f"So \\boxed{{{answer}}}") == right


@pytest.mark.parametrize(
    "gold, answer, bare, percent",
    [
        ("5", "5\\%", 0, 1), ("5\\%", "0.05", 0, 0), ("5%", "5", 0, 1), ("5%", "5 %", 1, 1),
        ("5 percent", "5\\%", 1, 1), ("5", "0.05", 0, 0), ("0.05", "5%", 0, 0),
        ("\\frac{1}{2}\\%", "0.5%", 1, 1),
    ],
)  # fmt: skip
def test_the_question_decides_about_percent(gold, answer, bare, percent):
    """BR-118: 5 % is neither 5 nor 0.05, unless a percentage is asked for."""
    box = f"\\boxed{{{answer}}}"
    assert value(gold, box) == bare
    assert value(gold, box, unit="percent") == percent
    with pytest.raises(ValueError, match="write None or 'percent'"):
        same_answer("5", "5", unit="%")


# What a response answers


@pytest.mark.parametrize(
    "text, strict, lenient",
    [
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("\\boxed{1} no, \\boxed{ \\text{2} }", "\\text{2}", "\\text{2}"),
        ("\\boxed{42", "", ""),
        ("<answer>\\boxed{42}</answer>", "42", "42"),
        ("<answer> $42$ </answer>", "42", "42"),
        ("16 - 3 = 13\n#### 1,234\n", "1,234", "1,234"),
        ("#### 5\n#### ", "", ""),
        (LONG, "", "73"),
        ("The answer is 7. Wait, the answer is **8**.", "", "8"),
        ("Long.\n\n**Answer:** 9", "", "9"),
        ("We get 3.\nHence **12**.", "", "12"),
        ("12", "", "12"),
        ("12\n13", "", ""),
        ("", "", ""),
    ],
)
def test_where_an_answer_is_looked_for(text, strict, lenient):
    assert (final_answer(text), final_answer(text, strict=False)) == (strict, lenient)


def test_bold_is_no_part_of_an_answer():
    """BR-114."""
    assert value("73", LONG, strict=False) == 1.0
    assert value("42", LONG, strict=False) == 0.0
    assert value("73", LONG) == 0.0
    assert value("73", "\\boxed{**73**}") == value("73", "\\boxed{$73$.}") == 1.0


def test_braces_are_counted():
    """BR-116: cut at the first brace, both would read "\\frac{1"."""
    assert value("\\frac{1}{3}", "\\boxed{\\frac{1}{2}}") == 0.0
    assert value("1/3", "\\boxed{\\frac{1}{2}}") == 0.0
    assert value("1/2", "\\boxed{\\frac{1}{2}}") == 1.0
    assert value("1/2", "\\boxed{\\frac{1}{2}") == 0.0
    assert value("\\frac{1}{2", "\\boxed{\\frac{1}{2}") == 0.0


@pytest.mark.parametrize("strict", [True, False])
def test_a_mention_is_no_answer(strict):
    """BR-119: 0 in strict mode; and a list in a sentence is never one number."""
    assert value("8", "It could be 7, 8 or 9.", strict=strict) == 0.0
    assert value("8", "\\boxed{7, 8 or 9}", strict=strict) == 0.0
    assert value("9", "The answer is 7, 8 or 9", strict=strict) == 0.0
    assert value("8", "8", strict=strict) == (not strict)


def test_only_the_response_is_scored():
    """BR-120: the prompt asks for a box; a response without one has none."""
    problem = Problem(0, "Answer in \\boxed{}. Is it \\boxed{8}?", "8", "mine", MathAnswer("8"))
    assert reward(problem, "8") == 0.0 and reward(problem, "\\boxed{8}") == 1.0
    assert reward(problem, "\\boxed{}") == 0.0


def test_a_box_in_an_answer_tag():
    """BR-121."""
    assert value("42", "<answer>\\boxed{42}</answer>") == 1.0
    assert value("42", "\\boxed{41} <answer>42</answer>") == 1.0


def test_gsm8k_answers_follow_the_marks():
    assert gsm8k_answer("She has <<16-3=13>>13.\n#### 1,018") == "1,018"
    assert value("1018", "so 9 * 2 = 18\n#### 1,018") == 1.0
    assert value("1018", "so 9 * 2 = 18\n#### 18") == value("1018", "#### 1018 or 7") == 0.0
    assert value("18", "#### $18.00") == value("18", "#### **18**.") == 1.0
    for text in ("no marks, 18", "####", "#### \n"):
        with pytest.raises(ValueError, match="ends in"):
            gsm8k_answer(text)


def test_an_unfinished_response_earns_nothing():
    problem = Problem(0, "q", "8", "mine", MathAnswer("8"))
    assert reward(problem, "\\boxed{8} and", finished=False) == 0.0


# Expressions, by math-verify


@pytest.mark.parametrize(
    "gold, answer, right",
    [
        ("\\sqrt{2}", "\\frac{2}{\\sqrt{2}}", True),
        ("x^2 + 1", "1 + x^2", True),
        ("x^2 + 1", "x^2 - 1", False),
        ("(1, 2)", "(2, 1)", False),
        ("\\{1, 2\\}", "\\{2, 1\\}", True),
        ("\\frac{\\pi}{3}", "\\pi/3", True),
        ("73", "73 \\text{ apples}", True),
        ("5", "x = 5", True),
        ("8", "7, 8", False),
        ("8", "7; 8", False),
        ("8", "8 \\text{ or } 9", False),
        ("9", "8 \\text{ or } 9", False),
        ("2", "2}, \\boxed{3", False),
        ("2", "the 2", False),
        ("5", "five = 5", False),  # prose: math-verify alone would take it
    ],
)
def test_expressions(process, gold, answer, right):
    assert same_answer(gold, answer, process=process) is right


def test_a_thread_judges_as_the_main_thread_does(process):
    """BR-122: math-verify's own timeout is a signal, which fails off the main thread."""
    pairs = [("\\sqrt{2}", "\\frac{2}{\\sqrt{2}}"), ("x^2", "x^3"), ("2*x + 1", "1 + 2x")]
    judge = lambda: [same_answer(*pair, process=process) for pair in pairs]
    out = []
    threads = [threading.Thread(target=lambda: out.append(judge())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out == [judge()] * 4 == [[True, False, True]] * 4


def test_an_answer_that_takes_for_ever_is_wrong_and_the_next_is_judged(process):
    assert process.equal("2x", "x + x")
    process.timeout = 2.0
    start = time.monotonic()
    assert process.equal("2", "10^{10^{10^{10}}}") is False
    assert process.equal("2x", "x + x") and time.monotonic() - start < 60


def test_a_dead_process_is_started_again_and_nothing_is_left(process):
    assert process.equal("x", "x")
    handles = _open_files()
    first = process._process
    first.kill()
    assert process.equal("2x", "x + x"), "not a wrong answer"
    assert process._process.pid != first.pid
    assert first.returncode is not None, "waited for: no zombie"
    assert _open_files() == handles
    last = process._process
    process.close()
    assert last.returncode is not None
    process.close()


def _open_files():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None


def test_an_outage_is_no_wrong_answer(monkeypatch, tmp_path):
    """BR-129: not scored."""
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    worker = tmp_path / "worker.py"
    monkeypatch.setattr(process_module, "WORKER", worker)
    process_module.shared_process.cache_clear()
    broken = {
        "import sys; sys.exit(1)": "did not start",
        "print('\"ready\"', flush=True); input()": "not judge even the gold",
    }
    for source, message in broken.items():
        worker.write_text(source)
        made = MathProcess(timeout=1.0)
        with pytest.raises(MathCheckError, match=message):
            made.equal("x", "y")
        made.close()
    assert value("x", "\\boxed{y}") is None and value("2", "\\boxed{3}") == 0.0
    process_module.shared_process().close()
    process_module.shared_process.cache_clear()


def test_a_missing_math_verify_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(process_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MathCheckError, match="pip install") as caught:
        MathProcess()
    assert "\n" not in str(caught.value)


def test_importing_math_answers_imports_no_sympy():
    code = "import sys, trace_jax.tasks.math_answers; sys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
