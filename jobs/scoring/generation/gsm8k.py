"""GSM8K with a chain of thought: prompts with eight worked examples, answer extraction, and the maj@k score.

The examples are those of Wei et al. 2022 (arXiv 2201.11903, Table 20). Majority voting over several samples follows
Wang et al. 2022 (arXiv 2203.11171).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from decimal import Decimal
from pathlib import Path

_EXAMPLES = Path(__file__).with_name("gsm8k_examples.txt")
# A minus sign is part of the number, except after a digit or a closing bracket, as in 21-15.
_NUMBER = re.compile(r"(?:(?<![\d)])-)?\$?\d[\d,]*(?:\.\d+)?")
_ANNOUNCEMENT = re.compile(r"the answer is", re.IGNORECASE)

STOP_STRINGS = ("\n\n", "Q:")


def few_shot_prompt(question: str) -> str:
    """Returns the worked examples followed by the question, ending where the model is to answer."""
    return f"{_EXAMPLES.read_text(encoding='utf-8').strip()}\n\nQ: {question.strip()}\nA:"


def extract_answer(text: str) -> str | None:
    """Returns the answer in canonical form, or None if the text contains no number.

    The answer is the last number after the last "The answer is", or else the last number of the text. Its canonical
    form is plain digits: `1,450.00` and `$1450` are `1450`.
    """
    announced = _ANNOUNCEMENT.split(text)[1:]
    numbers = (_NUMBER.findall(announced[-1]) if announced else []) or _NUMBER.findall(text)
    return canonical(numbers[-1]) if numbers else None


def gold_answer(answer: str) -> str:
    """Returns the number after `####` in a reference solution."""
    _, mark, number = answer.rpartition("####")
    if not mark or not (match := _NUMBER.fullmatch(number.strip())):
        raise ValueError("`answer` does not end in #### and a number")
    return canonical(match.group())


def canonical(number: str) -> str:
    """Returns a number without currency signs, thousands separators or trailing zeros after the decimal point."""
    digits = f"{Decimal(re.sub(r'[$,]', '', number)):f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def majority_score(samples: Sequence[tuple[Hashable | None, bool]], k: int) -> float:
    """Returns maj@k of one question: the share of its whole groups of k samples whose most frequent answer is correct.

    A sample is its answer and whether it is correct. One without an answer (None) has no vote. Ties go to the answer that
    occurs first. maj@1 is the share of correct samples.
    """
    wins = []
    for start in range(0, len(samples) // k * k, k):
        group = samples[start : start + k]
        votes = Counter(answer for answer, _ in group if answer is not None).most_common(1)
        wins.append(bool(votes) and dict(group)[votes[0][0]])
    return sum(wins) / len(wins)
