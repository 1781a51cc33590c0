"""The task of forks and locks: what is right, and how its texts are corrupted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sorted_copy import FORK_WEIGHTS, NUM_DIGITS, SHARE_NEXT, SHARE_RIGHT, WORDS, draw_texts, verify

DIGITS = st.lists(st.integers(0, 9), min_size=NUM_DIGITS, max_size=NUM_DIGITS)


@given(DIGITS, DIGITS)
def test_right_is_the_sorted_copy_and_nothing_else(forks: list[int], other: list[int]) -> None:
    def reward(*parts: list[int]) -> float:
        return verify({"text": " = ".join(" ".join(map(str, part)) for part in parts)})

    assert reward(forks, sorted(forks)) == 1.0
    assert reward(forks, other) == float(other == sorted(forks))
    assert reward(forks[1:], sorted(forks[1:])) == reward(forks) == reward([*forks, 1], sorted([*forks, 1])) == 0.0
    assert verify({"text": " ".join(map(str, [*forks, *sorted(forks)]))}) == 0.0


def test_texts_have_the_shares_that_they_are_said_to_have() -> None:
    texts = draw_texts(20_000, np.random.default_rng(0))
    words = np.array(WORDS)[texts]
    assert set(words[:, 0]) == set("abcdefgh")
    assert (words[:, 7] == "=").all()
    assert (words[:, 14] == "<end>").all()
    forks, locks = (words[:, part].astype(int) for part in (slice(1, 7), slice(8, 14)))
    shift = (locks - np.sort(forks, axis=-1)) % 10
    assert (shift == 0).mean() == pytest.approx(SHARE_RIGHT, abs=0.01)
    assert (shift == 1).mean() == pytest.approx(SHARE_NEXT, abs=0.01)
    places = (forks - (texts[:, :1] - 1)) % 10
    shares = np.bincount(places.ravel(), minlength=10) / places.size
    assert shares == pytest.approx(FORK_WEIGHTS, abs=0.01)
