"""GSM8K, math_dataset and LBPP as TFDS prepared them, read without TensorFlow.

Nothing is ever downloaded here; prepare a set once with TFDS's own command, such as
`tfds build gsm8k --file_format=array_record`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from trace_jax.tasks.coding import CodingProblems
from trace_jax.tasks.math_answers import MathAnswer, gsm8k_answer
from trace_jax.tasks.problems import Problem

GSM8K_HINT = "\nEnd with #### and the number."
BOX_HINT = "\nPut the answer in \\boxed{}."
_FROM_CODE = re.compile(r"^\s*from\s+code\s+import\s+(.+)$", re.MULTILINE)
_DEF = re.compile(r"^\s*def\s+(\w+)", re.MULTILINE)


def read_prepared(name: str, split: str, data_dir: str | Path | None = None) -> Sequence:
    """A prepared set with random access; rows are dictionaries of bytes.

    Args:
        name: TFDS's name, with a config after a slash where it has several.
        split: TFDS's own split, such as "train" or "test[:100]".
        data_dir: where the data was prepared; None is TFDS's default folder.

    Raises:
        ValueError: tensorflow-datasets is missing, or the data is not there in array_record.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(f'{name} is read by TFDS: pip install "trace_jax[data]"') from error
    try:
        return tfds.data_source(name, split=split, data_dir=data_dir, download=False)
    except Exception as error:  # TFDS raises many types here, and long texts
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise ValueError(
            f"{name}, split {split}, is not prepared in {data_dir or 'the default folder'}: run "
            f"`tfds build {name} --file_format=array_record` ({line})"
        ) from error


def text_of(value: object) -> str:
    """A text feature, which a data source gives as bytes."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


class PreparedProblems:
    """Problems made from rows when they are asked for.

    Args:
        rows: anything with a length and integer indexing.
        make: (index, row of texts) to a Problem.
    """

    def __init__(self, rows: Sequence, make: Callable[[int, dict], Problem]):
        self._rows, self._make = rows, make

    def __len__(self) -> int:
        return len(self._rows)

    def problem(self, i: int) -> Problem:
        """Row `i`; pass `size=len(problems)` to `batch_indices`. Raises IndexError past the end."""
        if not 0 <= i < len(self):
            raise IndexError(f"problem index is {i}: there are {len(self)} rows")
        row = {key: text_of(value) for key, value in self._rows[i].items()}
        return self._make(i, row)


def gsm8k(split: str, data_dir: str | Path | None = None, strict: bool = True) -> PreparedProblems:
    """Grade-school word problems, judged by number; raises as `read_prepared`."""

    def make(i: int, row: dict) -> Problem:
        gold = gsm8k_answer(row["answer"])
        prompt = row["question"].strip() + GSM8K_HINT
        return Problem(i, prompt, f"#### {gold}", "gsm8k", MathAnswer(gold, strict))

    return PreparedProblems(read_prepared("gsm8k", split, data_dir), make)


def math_dataset(
    config: str, split: str, data_dir: str | Path | None = None, strict: bool = True
) -> PreparedProblems:
    """One category, such as "algebra__linear_1d"; raises as `read_prepared`."""

    def make(i: int, row: dict) -> Problem:
        gold = row["answer"].strip()
        prompt = row["question"].strip() + BOX_HINT
        return Problem(
            i, prompt, f"\\boxed{{{gold}}}", f"math_dataset/{config}", MathAnswer(gold, strict)
        )

    return PreparedProblems(read_prepared(f"math_dataset/{config}", split, data_dir), make)


def lbpp(
    split: str = "test",
    data_dir: str | Path | None = None,
    checked: bool = True,
    part: str | None = None,
) -> CodingProblems:
    """Less Basic Python Problems. Rows whose own solution fails here are left out and counted.

    Those are mostly rows that need packages beyond the standard library. Checking runs every
    reference once, a quarter of a second each; `checked=False` skips it. The set has one split of
    TFDS's; `part` "train" or "heldout" keeps that share of its rows.

    Raises:
        ValueError: as `read_prepared`.
        SandboxUnavailable: this machine cannot isolate programs.
    """
    rows = [_lbpp_row(row) for row in read_prepared("lbpp/python", split, data_dir)]
    return CodingProblems(rows, "lbpp", split=part, checked=checked)


def _lbpp_row(row: dict) -> dict:
    setup, signature = text_of(row["test_setup"]), text_of(row["signature"])
    imported = [n for line in _FROM_CODE.findall(setup) for n in re.findall(r"\w+", line)]
    return {
        "prompt": f"{text_of(row['instruction']).strip()}\n{signature}\n",
        "answer": text_of(row["completion"]),
        "tests": "\n".join(text_of(test) for test in row["test_list"]),
        "names": tuple(imported or _DEF.findall(signature)),
        "setup": _FROM_CODE.sub("", setup),
    }
