"""Short wordings of reasoning_gym questions, so that small models can read them.

A dataset without an entry keeps its raw question and answer. To add one, add an entry here:
`prompt` and `answer` read a reasoning_gym entry, `parse` turns a response back into the text that
the dataset's own scorer reads, and `unique` asks for the very answer where that scorer is lenient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]


def _raw_question(entry: Entry) -> str:
    return entry["question"].strip()


def _raw_answer(entry: Entry) -> str:
    return str(entry["answer"] if entry["answer"] is not None else "").strip()


@dataclass(frozen=True)
class Template:
    """How one dataset is worded. Rooms never see reasoning_gym's own wording."""

    prompt: Callable[[Entry], str] = _raw_question
    answer: Callable[[Entry], str] = _raw_answer
    parse: Callable[[str], str] = str
    unique: bool = False


def _field(pattern: str) -> Callable[[Entry], str]:
    """Formats `pattern` with the entry's metadata."""
    return lambda entry: pattern.format(**entry["metadata"])


def _up_or_down(entry: Entry) -> str:
    return "up" if entry["metadata"]["direction"] == "ascending" else "down"


def _numbers(values: list) -> str:
    return " ".join(f"{float(v):g}" for v in values)


def _matrix(rows: list) -> str:
    return "\n".join(" ".join(map(str, row)) for row in rows)


def _sort_numbers(entry: Entry) -> str:
    return f"sort {_up_or_down(entry)} {_numbers(entry['metadata']['original_numbers'])} ="


def _sort_words(entry: Entry) -> str:
    return f"sort {_up_or_down(entry)} {' '.join(entry['metadata']['original_words'])} ="


RAW = Template()
_EXPRESSION = Template(_field("{expression} ="))

TEMPLATES: dict[str, Template] = {
    "base_conversion": Template(_field("base {source_base} to {target_base} {source_repr} =")),
    "basic_arithmetic": _EXPRESSION,
    "caesar_cipher": Template(_field("shift back by {rotation} {cipher_text} =")),
    "chain_sum": _EXPRESSION,
    "count_bits": Template(_field("bits {binary} =")),
    "decimal_chain_sum": _EXPRESSION,
    "gcd": Template(lambda e: f"gcd {_numbers(e['metadata']['numbers'])} ="),
    "letter_counting": Template(
        lambda e: f"count {e['metadata']['target_letter']} in {' '.join(e['metadata']['span'])} ="
    ),
    # The scorer forgives an error of 1 in every number, which would pay for wrong answers.
    "number_sorting": Template(
        _sort_numbers,
        lambda e: _numbers(e["metadata"]["sorted_numbers"]),
        lambda text: str(text.split()),
        unique=True,
    ),
    "palindrome_generation": Template(
        lambda e: f"palindrome {''.join(e['metadata']['letters'])} ="
    ),
    "products": _EXPRESSION,
    "simple_equations": Template(_field("{equation}, {variable} =")),
    "spiral_matrix": Template(lambda e: f"spiral\n{_matrix(e['metadata']['matrix'])}\n="),
    "spell_backward": Template(_field("reverse {word} =")),
    # The scorer reads only as many words as it expects and ignores what follows.
    "word_sorting": Template(
        _sort_words,
        lambda e: " ".join(e["metadata"]["sorted_words"]),
        lambda text: ", ".join(text.split()),
        unique=True,
    ),
}
