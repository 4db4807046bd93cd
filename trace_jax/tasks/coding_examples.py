"""Program by example: unlimited small coding problems of graded difficulty, by seed and index."""

from __future__ import annotations

import random

from trace_jax.tasks.coding import CodeTests
from trace_jax.tasks.problems import MAX_TRIES, Problem, check_split, split_of, stable_hash
from trace_jax.tasks.sandbox import Limits, require_isolation

# Steps of a program by the type of x; {k} is drawn from 2 to 5. They only ever read x.
STEPS = {
    "int": ("x + {k}", "x - {k}", "x * {k}", "x % {k}", "x // {k}", "x * x", "-x", "abs(x)"),
    "list": (
        "sorted(x)", "x[::-1]", "[v + {k} for v in x]", "[v * {k} for v in x]", "x[1:]", "x[:{k}]",
        "[v for v in x if v % 2 == 0]", "[v for v in x if v > {k}]", "[abs(v) for v in x]",
    ),
    "str": (
        "x[::-1]", "x.upper()", "x[1:]", "x[:{k}]", "x * {k}", "x + x[::-1]", "x.replace('a', 'o')",
        "''.join(sorted(x))", "x[::2]",
    ),
}  # fmt: skip
MAX_DIFFICULTY = 6


class ExamplePrograms:
    """Find f from some of its values; judged on values that the prompt does not show.

    Args:
        seed: the stream of problems.
        split: "train" or "heldout", by a hash of the prompt.
        difficulty: steps of the program, 1 to 6; each step is needed to explain the examples.
        shown: examples in the prompt.
        hidden: further inputs that the tests use.

    Raises:
        SandboxUnavailable: this machine cannot isolate programs.
        ValueError: a number out of range, an unknown split.
    """

    def __init__(self, seed: int, split: str, difficulty: int, shown: int = 4, hidden: int = 12):
        check_split(split)
        if not 1 <= difficulty <= MAX_DIFFICULTY:
            raise ValueError(f"difficulty is {difficulty}: write 1 to {MAX_DIFFICULTY}")
        if shown < 2 or hidden < 1:
            raise ValueError("write at least 2 shown examples and 1 hidden input")
        require_isolation()
        self.seed, self.split, self.difficulty = int(seed), split, difficulty
        self._shown, self._hidden = shown, hidden

    def problem(self, i: int) -> Problem:
        """Problem `i`, whatever was asked before. ValueError for a negative index."""
        if i < 0:
            raise ValueError(f"problem index is {i}: write 0 or more")
        for attempt in range(MAX_TRIES):
            place = stable_hash("program", self.seed, self.difficulty, i, attempt)
            made = self._make(random.Random(place))
            if made and split_of(made[0]) == self.split:
                prompt, answer, tests = made
                scorer = CodeTests(tests, ("f",), limits=Limits(cpu=2))
                return Problem(i, prompt, answer, f"examples_{self.difficulty}", scorer)
        raise ValueError(f"no program of {self.difficulty} steps was found: ask for fewer")

    def _make(self, rng: random.Random) -> tuple[str, str, str] | None:
        kind = rng.choice(sorted(STEPS))
        steps = [rng.choice(STEPS[kind]) for _ in range(self.difficulty)]
        steps = [step.format(k=rng.randint(2, 5)) for step in steps]
        inputs = [_draw(rng, kind) for _ in range(self._shown + self._hidden)]
        values = [_apply(steps, x) for x in inputs]
        if len(set(map(repr, values))) < len(values) // 2 or max(map(len, map(repr, values))) > 60:
            return None
        shown = inputs[: self._shown]
        for skip in range(len(steps)):
            shorter = steps[:skip] + steps[skip + 1 :]
            if all(_apply(shorter, x) == v for x, v in zip(shown, values, strict=False)):
                return None
        rows = [f"f({x!r}) = {v!r}" for x, v in zip(shown, values, strict=False)]
        prompt = "Write f in Python.\n" + "\n".join(rows) + "\n"
        body = "".join(f"    x = {step}\n" for step in steps)
        checks = [
            f"value = f({x!r})\nassert type(value) is {kind} and value == {v!r}"
            for x, v in zip(inputs, values, strict=True)
        ]
        return prompt, f"def f(x):\n{body}    return x", "\n".join(checks)


def _draw(rng: random.Random, kind: str):
    if kind == "int":
        return rng.randint(-20, 99)
    if kind == "list":
        return [rng.randint(-9, 20) for _ in range(rng.randint(3, 6))]
    return "".join(rng.choice("abcdeilmnorst") for _ in range(rng.randint(4, 7)))


def _apply(steps: list[str], x):
    for step in steps:  # our own templates, never a model's text
        x = eval(step, {}, {"x": x})
    return x
