"""A user's own problems from a file of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from trace_jax.tasks.problems import Problem, check_split, split_of


class JsonlProblems:
    """A user's own problems: one {"prompt": ..., "answer": ...} object a line, scored exactly.

    Args:
        path: the file; blank lines are skipped.
        split: "train" or "heldout" keeps that share of the rows, None keeps all.

    Raises:
        ValueError: a bad row, by its line number; no rows left.
    """

    def __init__(self, path: str | Path, split: str | None = None):
        if split is not None:
            check_split(split)
        self._rows: list[Problem] = []
        try:
            # Not splitlines(), which also cuts at U+2028 inside a JSON string.
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = _parse_row(line, f"{path}, line {number}")
            if split is None or split_of(row["prompt"]) == split:
                index = len(self._rows)
                self._rows.append(Problem(index, row["prompt"], row["answer"], Path(path).stem))
        if not self._rows:
            raise ValueError(f"{path} has no {split or 'usable'} rows: write a JSON object a line")

    def __len__(self) -> int:
        return len(self._rows)

    def problem(self, i: int) -> Problem:
        """Row `i`; pass `size=len(problems)` to `batch_indices`. Raises IndexError past the end."""
        if not 0 <= i < len(self._rows):
            raise IndexError(f"problem index is {i}: the file has {len(self._rows)} rows")
        return self._rows[i]


def _parse_row(line: str, where: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg})") from error
    for key in ("prompt", "answer"):
        if not isinstance(row, dict) or not isinstance(row.get(key), str) or not row[key].strip():
            raise ValueError(f'{where}: write {{"prompt": text, "answer": text}}; {key} is missing')
    return row
