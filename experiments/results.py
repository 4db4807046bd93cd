"""Result files: one JSON object a line, each with where and how it was measured."""

import json
import os
import statistics
from collections.abc import Iterable
from pathlib import Path

from trace_jax.runs import versions

FACTS = ("git_commit", "python", "jax", "hardware", "command")


def provenance() -> dict:
    """Commit, versions, hardware and command of this process."""
    known = versions()
    return {name: known.get(name) for name in FACTS}


def read_rows(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def write_rows(path: Path, rows: list[dict]) -> None:
    """Replaces a result file whole, or leaves it; a file that would be empty is not made."""
    if not rows and not path.exists():
        return
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(scratch, path)


def append_row(path: Path, row: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def mean_and_spread(values: Iterable[float | None], digits: int = 3) -> str:
    """'mean ± standard deviation' (of the sample, n - 1); of one value itself, of none 'n/a'."""
    known = [v for v in values if v is not None]
    if not known:
        return "n/a"
    spread = f" ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.{digits}f}{spread}"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def replace_section(path: Path, name: str, text: str) -> None:
    """Puts `text` between the markers <!-- name --> and <!-- /name --> of a Markdown file.

    Without the file it does nothing: results that are sent elsewhere have no page beside them.

    Raises:
      ValueError: a file without the markers.
    """
    if not path.exists():
        return
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = path.read_text()
    head, found, rest = old.partition(start)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} has no section {start} ... {end}; write the two markers into it")
    path.write_text(f"{head}{start}\n{text}\n{end}{tail}")
