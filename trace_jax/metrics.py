"""What a run measured: JSON lines always, TensorBoard events and a progress bar beside them."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

METRICS = "metrics.jsonl"


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of a run, in order. A last line that a killed process left half-written is skipped.

    Raises ValueError for any other line that is no JSON object.
    """
    path = Path(run_dir) / METRICS
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                rows.append(_row(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not a JSON object with a step") from error
    return rows


def _row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict) or "step" not in row:
        raise ValueError("no step")
    return row


class MetricWriter:
    """Appends one JSON object a step to metrics.jsonl, and scalars to TensorBoard if installed.

    Args:
        run_dir: the run's folder.
        first_step: where this process starts: rows from there on, which a resumed run writes
            again, are dropped first.
    """

    def __init__(self, run_dir: str | Path, first_step: int = 0, tensorboard: bool = True):
        self.path = Path(run_dir) / METRICS
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(run_dir) if row["step"] < first_step]
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(scratch, self.path)
        self.nonfinite = kept[-1].get("nonfinite_metrics", 0) if kept else 0
        self._file = open(self.path, "a", encoding="utf-8")
        self._events = _event_writer(self.path.parent, first_step) if tensorboard else None

    def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Writes one row and returns it.

        Args:
            step: the iteration.
            values: flat scalars (numbers, 0-d arrays, strings, None). NaN and infinity become
                null and are counted under "nonfinite_metrics", since JSON has no word for them.

        Raises:
            TypeError: a value that is no scalar, by its key.
        """
        row = {"step": int(step)} | {key: _scalar(key, value) for key, value in values.items()}
        bad = [k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
        self.nonfinite += len(bad)
        row |= dict.fromkeys(bad)
        row["nonfinite_metrics"] = self.nonfinite
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        if self._events:
            for key, value in row.items():
                if isinstance(value, (int, float)) and key != "step":
                    self._events.add_scalar(key, value, int(step))
        return row

    def close(self) -> None:
        self._file.close()
        if self._events:
            self._events.close()

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _scalar(key: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if getattr(value, "ndim", None) == 0:
        value = value.item()
        if isinstance(value, (bool, int, float, str)):
            return value
    raise TypeError(f"metric {key} is a {type(value).__name__}: write one number a key")


def _event_writer(run_dir: Path, first_step: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    # purge_step hides what an interrupted run had written beyond the resumed step.
    return SummaryWriter(logdir=str(run_dir / "tensorboard"), purge_step=first_step or None)


# What one line of the console shows: label, metric, format.
LINE = (
    ("loss", "warmup/loss", "{:.3f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("held-out", "eval/accuracy", "{:.3f}"),
    ("KL", "mismatch/k3", "{:.1e}"),
    ("codes agree", "agreement/mean", "{:.2%}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("guidance B/token", "guidance/bytes_per_token", "{:,.0f}"),
)


def format_line(step: int, row: Mapping[str, Any]) -> str:
    """One iteration in one line; what was not measured in it is left out."""
    known = {key: _scalar(key, row[key]) for _, key, _ in LINE if key in row}
    parts = [f"{name} {form.format(known[key])}" for name, key, form in LINE
             if isinstance(known.get(key), (int, float))]
    lost = [name for name, key, _ in LINE if key in row and row[key] is None]
    return "  ".join([f"step {step:4d}", *parts, *(f"{name} not finite" for name in lost)])


class ProgressLine:
    """A progress bar with the time left, and one line per iteration above it.

    Without a terminal (a log file, CI) only the lines are printed. Everything goes to `stream`,
    standard error by default, so that standard output stays free for results.
    """

    def __init__(self, total: int, first_step: int = 0, title: str = "", stream: TextIO = None):
        self.stream = stream or sys.stderr
        self._bar = None
        if self.stream.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(
                total=total, initial=first_step, desc=title or None, file=self.stream, leave=False
            )

    def update(self, step: int, row: Mapping[str, Any]) -> None:
        """Prints the line of `step` and moves the bar by one."""
        line = format_line(step, row)
        if self._bar is None:
            print(line, file=self.stream, flush=True)
        else:
            self._bar.write(line, file=self.stream)
            self._bar.update()

    def advance(self) -> None:
        """Moves the bar by one without a line."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
