"""The benchmark of arithmetic: what chooses and what reports are apart, and differences are paired over seeds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

from benchmarks.arithmetic import held_out_texts, show_differences
from benchmarks.product_paths import WORDS, check, split_targets

MEASURES = ("correct", "distinct_correct", "pass_at_k", "maj_at_k")


def test_even_texts_are_of_development_targets_and_odd_ones_of_test_targets() -> None:
    targets = split_targets()
    seen: dict[str, set[int]] = {"development": set(), "test": set()}
    for place, tokens in enumerate(held_out_texts(3)):
        words = [WORDS[token] for token in tokens]
        target = int(words[0] + words[1])
        assert words[2] == ":"
        assert words.index("<end>") == len(words) - 1
        assert check(target, " ".join(words[3:-1]))[1]
        seen["test" if place % 2 else "development"].add(target)
    assert seen == {name: set(targets[name]) for name in ("development", "test")}  # type: ignore[index]
    assert held_out_texts(3) != held_out_texts(4)


def test_differences_are_paired_over_seeds() -> None:
    """A rival that moves with the seed as the learned one does has a narrow interval, however wide those of both are."""
    ours, theirs = [0.50, 0.70, 0.60], [0.40, 0.61, 0.49]

    def run_of(own: float, other: float) -> dict[str, Any]:
        values = {"TempNet, reward each": own, "TempNet, reward distinct": own + 0.1, "min-p": other}
        return {
            "decoders": {
                name: {"prompts": {measure: {"mean": value} for measure in MEASURES}} for name, value in values.items()
            }
        }

    shown = show_differences([run_of(*pair) for pair in zip(ours, theirs, strict=True)])
    row = next(line for line in shown.splitlines() if line.startswith("| min-p")).split("|")
    gaps = 100 * (np.array(ours) - np.array(theirs))
    half = student.ppf(0.975, 2) * np.std(gaps, ddof=1) / math.sqrt(3)
    cells = [cell.strip() for cell in row[2:-1]]
    assert len(cells) == 2 * len(MEASURES)
    for cell, mean in zip(cells, [gaps.mean()] * 4 + [gaps.mean() + 10] * 4, strict=True):
        found, width = map(float, cell.split(" ± "))
        assert found == pytest.approx(mean, abs=0.06)
        assert width == pytest.approx(half, abs=0.06)
