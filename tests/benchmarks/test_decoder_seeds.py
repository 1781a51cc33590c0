"""The benchmark of decoders: its task can be verified, and its table holds intervals over seeds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

from benchmarks.decoders import END, MARK, check_digits, combine, make_texts


def test_texts_without_noise_are_correct_and_noise_breaks_the_locks_alone() -> None:
    for text in make_texts(50, 0.0, seed=0).tolist():
        assert text[-1] == END
        assert check_digits(text[:-1]) == (tuple(text[:6]), True)
    noisy = make_texts(4000, 0.6, seed=0)
    assert np.isin(noisy[:, :6], range(10)).all()
    assert (noisy[:, 6] == MARK).all()
    # A lock stays right if it is not replaced, or replaced by itself: 0.4 + 0.6/10.
    assert (noisy[:, 7:13] == np.sort(noisy[:, :6], axis=1)).mean() == pytest.approx(0.46, abs=0.01)
    assert not (make_texts(5, 0.6, seed=1) == make_texts(5, 0.6, seed=2)).all()


@pytest.mark.parametrize(
    ("tokens", "answer", "is_right"),
    [
        ([3, 1, 2, 9, 0, 5, MARK, 0, 1, 2, 3, 5, 9], (3, 1, 2, 9, 0, 5), True),
        ([3, 1, 2, 9, 0, 5, MARK, 0, 1, 2, 3, 5], (3, 1, 2, 9, 0, 5), False),
        ([3, 1, 2, 9, 0, 5, MARK, 0, 1, 2, 3, 9, 5], (3, 1, 2, 9, 0, 5), False),
        ([3, 1, 2, MARK, 0, 5, MARK, 0, 1, 2, 3, 5, 9], None, False),
        ([3, 1], None, False),
    ],
)
def test_answers_are_checked(tokens: list[int], answer: tuple[int, ...] | None, is_right: bool) -> None:
    assert check_digits(tokens) == (answer, is_right)


def run_of(loss: float | None, gain: float, rule: str) -> dict[str, Any]:
    text = {"rule": rule, "loss": {"mean": loss, "half_width": 0.1}, "gain": {"mean": gain, "half_width": 9.0}}
    prompts = {"rule": rule, "distinct": {"mean": gain, "half_width": 9.0}, "length": gain, "correct": None}
    return {
        "num_tokens": 10,
        "human_loss": 1.0,
        "decoders": {"min-p": {"text": text, "prompts": prompts}},
        "tried": [{"decoder": "min-p"}],
    }


def test_means_and_intervals_are_over_seeds_and_not_over_documents() -> None:
    gains = [0.1, 0.4, 0.3]
    runs = [run_of(loss, gain, rule) for loss, gain, rule in zip((2.0, None, 3.0), gains, ("a", "b", "a"), strict=True)]
    values = combine(runs)
    found = values["decoders"]["min-p"]
    assert found["text"]["gain"]["mean"] == pytest.approx(np.mean(gains))
    half = student.ppf(0.975, 2) * np.std(gains, ddof=1) / math.sqrt(3)
    assert found["text"]["gain"]["half_width"] == pytest.approx(half)
    assert found["text"]["loss"] == {"mean": None, "half_width": None}
    assert found["text"]["rule"] == "a; b"
    assert found["prompts"]["length"] == pytest.approx(np.mean(gains))
    assert found["prompts"]["correct"] is None
    assert values["num_tokens"] == 30
    assert len(values["tried"]) == 3
