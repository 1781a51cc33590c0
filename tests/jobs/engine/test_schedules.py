"""Tests that the learning-rate schedule follows its description."""

from __future__ import annotations

import itertools
import math

import pytest

from jobs.engine.schedules import decay_with_warmup


def test_warm_up_is_linear_and_the_cosine_ends_at_its_share() -> None:
    factor = decay_with_warmup(1000, warmup_share=0.1, final_share=0.2)
    assert [factor(step) for step in (0, 49, 99)] == pytest.approx([0.01, 0.5, 1.0])
    assert factor(100) == pytest.approx(1.0)
    assert factor(550) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert factor(1000) == pytest.approx(0.2)
    values = [factor(step) for step in range(100, 1001)]
    assert all(later < earlier for earlier, later in itertools.pairwise(values))


def test_no_warm_up() -> None:
    factor = decay_with_warmup(10, warmup_share=0.0)
    assert factor(0) == 1.0
    assert factor(10) == pytest.approx(0.0)


def test_a_rest_comes_before_the_warm_up() -> None:
    factor = decay_with_warmup(1000, warmup_share=0.1, rest_share=0.2)
    assert {factor(step) for step in range(200)} == {0.0}
    assert [factor(step) for step in (200, 249, 299)] == pytest.approx([0.01, 0.5, 1.0])
    assert factor(650) == pytest.approx(0.5)
    assert factor(1000) == pytest.approx(0.0)


def test_a_slanted_triangle() -> None:
    factor = decay_with_warmup(1000, decay="linear", warmup_share=0.1, final_share=0.1)
    assert [factor(step) for step in (49, 99, 100, 550, 1000)] == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1])
