"""Tests the worked examples of GSM8K, the number that is read from an answer, and majorities."""

from __future__ import annotations

import pytest

from jobs.scoring.generation.gsm8k import (
    canonical,
    divisors,
    extract_answer,
    few_shot_prompt,
    gold_answer,
    majority_score,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She has 3 and 4, so 7. The answer is 7.", "7"),
        ("The answer is $1,450.00 a week.", "1450"),
        ("the answer is 8 - 3 = 5 dollars.", "5"),
        ("The answer is 2. Wait, no. The answer is 18.", "18"),
        ("That makes 21-15 = 6 trees", "6"),
        ("21-15", "15"),
        ("It fell to -3", "-3"),
        ("He owes -$3.50", "-3.5"),
        ("5 apples. The answer is unknown.", "5"),
        ("nothing to count", None),
        ("The answer is 007", "7"),
        ("9" * 60, "9" * 60),
        ("", None),
    ],
)
def test_extraction(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_gold() -> None:
    assert gold_answer("2 + 2 = <<2+2=4>>4\n#### 4") == "4"
    assert gold_answer("#### 2,125") == "2125"
    assert gold_answer("#### -10") == "-10"
    for bad in ("4", "#### four", "####"):
        with pytest.raises(ValueError, match="does not end in ####"):
            gold_answer(bad)
    assert canonical("100") == "100"


def test_the_prompt_is_eight_worked_examples_and_the_question() -> None:
    *examples, last = few_shot_prompt(" How many? ").split("\n\n")
    assert len(examples) == 8
    answers = ["6", "5", "39", "8", "9", "29", "33", "8"]
    assert [extract_answer(example) for example in examples] == answers
    assert all(example.startswith("Q: ") and "\nA: " in example for example in examples)
    assert last == "Q: How many?\nA:"


def test_majorities() -> None:
    answers = ["3", "4", "4", None, "3", "3", "9", "4"]
    assert majority_score(answers, "4", 1) == 3 / 8
    assert majority_score(answers, "3", 1) == 3 / 8
    # The groups of four are [3 4 4 -], whose majority is 4, and [3 3 9 4], whose majority is 3.
    assert majority_score(answers, "4", 4) == 1 / 2
    # All eight hold three 3s and three 4s, and the 3 wins because it was seen first.
    assert majority_score(answers, "3", 8) == 1.0
    assert majority_score(answers, "4", 8) == 0.0
    assert majority_score([None, None], "4", 2) == 0.0
    assert divisors(8) == [1, 2, 4, 8]
