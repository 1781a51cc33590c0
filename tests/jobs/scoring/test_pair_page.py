"""Tests of the correlation that the page of image–text pairs shows."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from jobs.scoring.temperatures.pairs.config import PredictPairTemperaturesConfig
from jobs.scoring.temperatures.pairs.page import correlate


def test_the_correlation_is_spearmans_and_its_interval_holds_it_in_95_of_100_samples() -> None:
    rng = np.random.default_rng(0)
    covered = []
    population = np.array([[1.0, 0.6], [0.6, 1.0]])
    true = 6 / np.pi * np.arcsin(0.6 / 2)  # Spearman's correlation of a normal distribution
    for _ in range(400):
        x, y = rng.multivariate_normal([0, 0], population, size=80).T
        r, half = correlate(x, y)
        assert r == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
        covered.append(abs(r - true) <= half)
    assert 0.93 <= np.mean(covered) <= 0.99


def test_few_pairs_and_extremes() -> None:
    with pytest.raises(ValueError, match="needs 4 pairs, and 3 have the label"):
        correlate(np.arange(3.0), np.arange(3.0))
    r, half = correlate(np.arange(9.0), np.arange(9.0))
    assert r == pytest.approx(1.0)
    assert 0 <= half < 1e-3
    assert correlate(np.ones(9), np.arange(9.0))[0] == 0.0


def test_a_label_needs_a_page() -> None:
    with pytest.raises(ValueError, match="label = n is shown on the page only: html must name a file"):
        PredictPairTemperaturesConfig(model="m", images="i", output="o", label="n")
