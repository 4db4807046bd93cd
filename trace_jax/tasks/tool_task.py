"""A task for tools: numbers lie in a key-value store, a calculator adds them up."""

from __future__ import annotations

import ast
import operator
import random
import re

from trace_jax.tasks.environments import Step

ITEMS = ("apple", "pear", "plum", "fig", "lime", "kiwi", "date", "nut")
HELP = "Say get NAME, put NAME NUMBER, calc EXPRESSION or answer NUMBER."
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_MAX_DIGITS = 12
_NAME = re.compile(r"[a-z]{1,12}$")
_INTEGER = re.compile(rf"-?\d{{1,{_MAX_DIGITS}}}$", re.ASCII)


def calculate(text: str) -> int | None:
    """The value of whole numbers with + - * and brackets; None for anything else."""
    if len(text) > 100:
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("not arithmetic")
    if abs(value) >= 10**_MAX_DIGITS:
        raise ValueError("too large")
    return value


class ToolTask:
    """Work out a sum of stored numbers and answer it, or store it under "total" and say done.

    Args:
        items: numbers to fetch, 1 to 8.
        store: ask for the result in the store instead of an answer.
    """

    def __init__(self, items: int = 2, store: bool = False):
        if not 1 <= items <= len(ITEMS):
            raise ValueError(f"items is {items}: write 1 to {len(ITEMS)}")
        self.items, self.store = items, store

    def reset(self, seed: int) -> str:
        rng = random.Random(f"tools {self.items} {self.store} {seed}")
        names = rng.sample(ITEMS, self.items)
        self._stored = {name: rng.randint(10, 99) for name in names}
        counts = [rng.randint(2, 9) for _ in names]
        self._goal = sum(k * self._stored[n] for k, n in zip(counts, names, strict=True))
        self._plan = list(zip(counts, names, strict=True))
        what = " + ".join(f"{k} * {name}" for k, name in self._plan)
        if self.store:
            return f"Put {what} under total, then say done. {HELP}"
        return f"What is {what}? {HELP}"

    def step(self, action: str) -> Step:
        word, _, rest = action.strip().partition(" ")
        rest = rest.strip()
        if word == "answer" and not self.store:
            right = _INTEGER.match(rest) is not None and int(rest) == self._goal
            return Step("Right." if right else "Wrong.", float(right), True)
        if word == "done" and self.store:
            right = self._stored.get("total") == self._goal
            return Step("Right." if right else "Wrong.", float(right), True)
        if word == "get":
            return Step(str(self._stored.get(rest, "nothing there")))
        if word == "calc":
            value = calculate(rest)
            return Step("not arithmetic" if value is None else str(value))
        name, _, number = rest.partition(" ")
        if word == "put" and _NAME.match(name) and _INTEGER.match(number.strip()):
            if name not in self._stored and len(self._stored) >= 64:
                return Step("the store is full")
            self._stored[name] = int(number)
            return Step("stored")
        return Step(f"unknown. {HELP}")

    def solution(self) -> list[str]:
        """Actions that solve the episode from its start; for tests and warm starts."""
        gets = [f"get {name}" for _, name in self._plan]
        terms = " + ".join(f"{k} * {self._stored[name]}" for k, name in self._plan)
        end = [f"put total {self._goal}", "done"] if self.store else [f"answer {self._goal}"]
        return [*gets, f"calc {terms}", *end]
