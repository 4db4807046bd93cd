"""Are two mathematical answers the same? Numbers exactly and here, the rest by math-verify.

Rules that math-verify alone gets wrong: a mixed number is its sum, and "4 10/3" is none; 5 % is
not 5, nor 0.05, unless the question asks for a percentage; a number somewhere in a sentence is no
answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from trace_jax.tasks.math_process import MathProcess, shared_process
from trace_jax.tasks.rewards import extract_answer

MAX_LENGTH = 500  # of an answer; a longer one is no answer
UNITS = (None, "percent")
_PERCENT = re.compile(r"\s*(?:\\?%|\bpercent\b)\s*$")
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_NUMBER = re.compile(rf"([+-]?)(?=[\d.])({_DECIMAL})(?:[eE]([+-]?\d{{1,3}}))?$")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_FRACTION = re.compile(r"([+-]?)\s*(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)$")
_PHRASE = re.compile(r"answer(?:\s+is\b|\s*\**\s*[:=])\s*:?[\s*]*", re.IGNORECASE)
_BOLD_END = re.compile(r"\*\*([^*\n]+)\*\*\s*\.?$")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{[^{}]*\}")
_KNOWN_WORDS = {"sqrt", "pi", "sin", "cos", "tan", "log", "ln", "exp", "e", "oo", "inf"}


def final_answer(text: str, strict: bool = True) -> str:
    """The answer that a response commits to, "" for none.

    Strict reads the last <answer> tag, the last closed box or the last "#### n" line. Otherwise
    "the answer is ...", bold text at the end, or a response of one line will do as well.
    """
    text = text.strip()
    if "\\boxed{" in text or ("<answer>" in text and "</answer>" in text):
        return clean(extract_answer(text))
    if "####" in text:
        return clean((text.rsplit("####", 1)[1].strip().splitlines() or [""])[0])
    if strict:
        return ""
    if phrases := list(_PHRASE.finditer(text)):
        return clean(text[phrases[-1].end() :].partition("\n")[0])
    if bold := _BOLD_END.search(text):
        return clean(bold[1])
    return "" if "\n" in text else clean(text)


def gsm8k_answer(text: str) -> str:
    """What follows "####" in a GSM8K solution. ValueError when there is none."""
    if "####" not in text or not (answer := final_answer(text[text.rindex("####") :])):
        raise ValueError('a GSM8K answer ends in "#### " and a number; this one does not')
    return answer


def clean(text: str) -> str:
    """Without the marks around an answer: spaces, dollars, bold, brackets of math, a full stop."""
    text = re.sub(r"\\[!,;:]", "", text).strip()
    while True:
        before = text
        for left, right in (("**", "**"), ("\\(", "\\)"), ("\\[", "\\]"), ("$", "$"), ("`", "`")):
            if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
                text = text[len(left) : -len(right)].strip()
        text = text.removesuffix("**").rstrip(".").strip()
        if text == before:
            return text


def number(text: str) -> Fraction | None:
    """The exact value of a decimal, a fraction or a mixed number; None for anything else."""
    text = text.removeprefix("\\$").removeprefix("$").strip()
    text = _LATEX_FRACTION.sub(r" \1/\2", text).replace("- ", "-", 1).strip()
    if match := _FRACTION.match(text):
        sign, whole, top, bottom = match[1], *(int(g or 0) for g in match.groups()[1:])
        if bottom == 0 or (match[2] and top >= bottom):
            return None
        value = whole + Fraction(top, bottom)
        return -value if sign == "-" else value
    if match := _NUMBER.match(text):
        digits = match[2].replace(",", "")
        value = Fraction(digits) * Fraction(10) ** int(match[3] or 0)
        return -value if match[1] == "-" else value
    return None


def _plain_expression(text: str) -> bool:
    """Whether math-verify may read it: prose or two numbers side by side would lose a part."""
    words = set(_WORD.findall(_TEXT.sub("", text)))
    return not (words - _KNOWN_WORDS) and not re.search(r"\d\s+\d", text)


def same_answer(
    gold: str, answer: str, unit: str | None = None, process: MathProcess | None = None
) -> bool:
    """Whether `answer` has the value of `gold`; both without their box.

    Args:
        gold: the right answer.
        answer: the one to judge.
        unit: "percent" when the question asks for a percentage, so that 5 and 5 % are the same.
        process: the process to ask where numbers do not settle it; None takes the shared one.

    Raises:
        MathCheckError: it could not be found out. That is no wrong answer.
        ValueError: an unknown unit.
    """
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}: write None or 'percent'")
    gold, answer = clean(gold), clean(answer)
    if not answer or max(len(gold), len(answer)) > MAX_LENGTH:
        return False
    if unit is None and bool(_PERCENT.search(gold)) != bool(_PERCENT.search(answer)):
        return False
    gold, answer = (_PERCENT.sub("", text) for text in (gold, answer))
    if gold == answer:
        return True
    known, given = number(gold), number(answer)
    if known is not None and given is not None:
        return known == given
    if not (_plain_expression(gold) and _plain_expression(answer)):
        return False
    return (process or shared_process()).equal(gold, answer)


@dataclass(frozen=True)
class MathAnswer:
    """A scorer for `Problem`: the response's final answer against `gold`."""

    gold: str
    strict: bool = True
    unit: str | None = None

    whole_response = True  # strict reading must see whether there was a box

    def __call__(self, response: str) -> float:
        return float(same_answer(self.gold, final_answer(response, self.strict), self.unit))
