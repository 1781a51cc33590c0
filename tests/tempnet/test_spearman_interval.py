"""Tests of the interval of a rank correlation: it holds the true one as often as it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from tempnet.statistics import spearman_interval


def test_the_correlation_is_spearmans_and_its_interval_holds_it_in_95_of_100_samples() -> None:
    rng = np.random.default_rng(0)
    covered = []
    population = np.array([[1.0, 0.6], [0.6, 1.0]])
    true = 6 / np.pi * np.arcsin(0.6 / 2)  # Spearman's correlation of a normal distribution
    for _ in range(400):
        x, y = rng.multivariate_normal([0, 0], population, size=80).T
        r, half = spearman_interval(torch.from_numpy(x.copy()), torch.from_numpy(y.copy()))
        assert r == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
        covered.append(abs(r - true) <= half)
    assert 0.93 <= np.mean(covered) <= 0.99


def test_few_values_and_extremes() -> None:
    with pytest.raises(ValueError, match="needs 4 values, not 3"):
        spearman_interval(torch.arange(3.0), torch.arange(3.0))
    r, half = spearman_interval(torch.arange(9.0), torch.arange(9.0))
    assert r == pytest.approx(1.0)
    assert 0 <= half < 1e-3
    assert spearman_interval(torch.ones(9), torch.arange(9.0))[0] == 0.0
