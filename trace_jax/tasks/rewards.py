"""Exact, verifiable rewards on the response's text."""

from __future__ import annotations

from trace_jax.tasks.problems import Problem

# What a scorer raises when it cannot parse an answer, as opposed to an outage of its service.
_PARSE_ERRORS = (
    ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError
)


def extract_answer(text: str) -> str:
    """The answer inside a response: last <answer> tag, then last \\boxed{}, else all of the text.

    The whole text must be the answer: a right number somewhere in it earns nothing.
    """
    text = text.strip()
    if "</answer>" in text and "<answer>" in text:
        text = text[: text.rindex("</answer>")]
        text = text[text.rfind("<answer>") + len("<answer>") :].strip()
    if "\\boxed{" in text:
        text = _boxed(text[text.rindex("\\boxed{") + len("\\boxed{") :])
    return text


def _boxed(text: str) -> str:
    """Content up to the brace that closes the box; "" when it never closes."""
    depth = 1
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[:i].strip()
    return ""


def _score(problem: Problem, text: str) -> float:
    if problem.scorer is None:
        return float(text == problem.answer.strip())
    return problem.scorer(text)


def reward(problem: Problem, response_text: str, finished: bool = True) -> float | None:
    """1.0 for a full score, else 0.0; None when the scorer itself failed.

    Args:
        problem: where the response came from.
        response_text: the response only, never the prompt.
        finished: False for a response that was cut off, which earns 0.0.

    None means "not scored": drop the sample and count it, for a 0 would punish a sample for an
    outage.
    """
    # Code and strict math read their own marks: fences, indents, boxes.
    whole = getattr(problem.scorer, "whole_response", False)
    text = (response_text if whole else extract_answer(response_text)) if finished else ""
    if not text.strip():
        return 0.0
    try:
        return float(_score(problem, text) == 1.0)
    except _PARSE_ERRORS:
        # Some scorers raise on text that is no answer at all. If the gold text still passes,
        # the scorer is in order and the response is at fault.
        return 0.0 if _gold_passes(problem) else None
    except Exception:  # an outage: whatever it is, the response has not been judged
        return None


def _gold_passes(problem: Problem) -> bool:
    try:
        return _score(problem, problem.answer) == 1.0
    except Exception:
        return False
