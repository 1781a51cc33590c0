"""The task of products: what is right, what demonstrations show, and that no target is in two parts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.product_paths import (
    END,
    FACTORS,
    NUM_NEW_TOKENS,
    TARGETS,
    WORDS,
    check,
    draw_texts,
    path_of,
    prompt_of,
    split_targets,
    tokens_of,
    verify,
)

FACTOR = st.sampled_from(FACTORS)


@given(st.sampled_from(TARGETS), FACTOR, FACTOR, st.integers(0, 99), st.sampled_from("+-"), st.integers(0, 99))
def test_right_is_what_python_computes(
    target: int, first: int, second: int, product: int, sign: str, distance: int
) -> None:
    for shown, apart in ((product, distance), (first * second, abs(target - first * second))):
        text = f"{first} * {second} = {' '.join(str(shown))} {sign} {' '.join(str(apart))}"
        reached = shown + apart if sign == "+" else shown - apart
        # Nothing is written as "+ 0", so that no path has two forms.
        is_right = first * second == shown and reached == target and (sign, apart) != ("-", 0)
        assert check(target, text) == ((first, second), is_right)
        assert verify({"target": target, "text": text}) == float(is_right)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "6 * 8 = 4 8",
        "6 * 8 = 4 8 + 9 9 9",
        "1 * 8 = 8 + 4 9",
        "6 * 8 = 4 8 + 9 :",
        "6 * 8 = 48 + 9",
        "__import__('os')",
        "5 7 : 6 * 8 = 4 8 + 9",
    ],
)
def test_other_forms_have_no_answer(text: str) -> None:
    assert check(57, text) == (None, False)
    assert check(57, "6 * 8 = 4 8 + 9") == ((6, 8), True)


def test_every_target_is_in_one_part_and_has_64_right_paths() -> None:
    parts = split_targets()
    assert {name: len(part) for name, part in parts.items()} == {"train": 60, "development": 15, "test": 15}
    assert sorted(target for part in parts.values() for target in part) == list(TARGETS)
    for target in TARGETS:
        paths = [path_of(target, first, second) for first in FACTORS for second in FACTORS]
        assert len(set(paths)) == 64
        assert all(check(target, path)[1] for path in paths)
        assert max(len(path.split()) for path in paths) < NUM_NEW_TOKENS


def test_demonstrations_are_right_and_prefer_near_products() -> None:
    texts = draw_texts(8000, (57,), np.random.default_rng(0))
    assert texts.shape == (8000, 14)
    pairs: Counter[tuple[int, int]] = Counter()
    for row in texts.tolist():
        end = row.index(0, 1)
        assert row[:4] == tokens_of(prompt_of(57))
        assert set(row[end:]) == {WORDS.index(END)}
        pair, is_right = check(57, " ".join(WORDS[token] for token in row[4:end]))
        assert is_right
        assert pair is not None
        pairs[pair] += 1
    weights = {(a, b): 1 / (1 + abs(a * b - 57)) for a in FACTORS for b in FACTORS}
    for pair, weight in weights.items():
        share = weight / sum(weights.values())
        assert pairs[pair] / 8000 == pytest.approx(share, abs=5 * (share / 8000) ** 0.5)
