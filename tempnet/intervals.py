"""Estimates with 95 % intervals: the one implementation for validation, headroom, rewards, analyses and benchmarks.

All of them are Student's t on the number of independent groups, less one, so that few records give wide intervals. What is
independent is said by the caller: documents, prompts, images or seeds, never tokens of one document.

    mean of n values        t·s/√n
    ratio Σd/Σn             t·√(G/(G − 1)·Σ_g (d_g − n_g·Σd/Σn)²)/Σn      d_g, n_g: sums over the group g of G
    difference of means     Welch: √(s₁²/n₁ + s₂²/n₂), degrees of freedom of Satterthwaite
    any statistic           jackknife over groups

A mean of rows whose groups are known is the ratio with d_g the sum of a group's values and n_g its number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tempnet.statistics import spearman

Values = Sequence[float] | np.ndarray | Tensor


class Interval(NamedTuple):
    """An estimate and the half-width of its 95 % confidence interval (NaN for a single group)."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half_width

    def as_json(self) -> dict[str, float | None]:
        """Return the estimate and its half-width, None in the place of NaN, which JSON does not know."""
        return {name: value if math.isfinite(value) else None for name, value in self._asdict().items()}


def mean_interval(values: Values, groups: Tensor | None = None) -> Interval:
    """Return the mean of values (...) with its interval; no values raise ValueError.

    Values of different groups, (...) integers, are independent; without groups each value is a group of its own.
    """
    flat = torch.as_tensor(values, dtype=torch.float64).flatten()
    if not len(flat):
        raise ValueError("a mean needs at least one value")
    if groups is None:
        return ratio_interval(flat, torch.ones_like(flat))
    _, group = torch.unique(groups.flatten(), return_inverse=True)
    sums = flat.new_zeros(2, int(group.max()) + 1).index_add_(1, group, torch.stack([flat, torch.ones_like(flat)]))
    return ratio_interval(sums[0], sums[1])


def ratio_interval(sums: Tensor, counts: Tensor) -> Interval:
    """Return Σ sums/Σ counts with its interval, for the sums (G,) and the numbers of rows (G,) of independent groups."""
    mean, error, freedom = ratio_error(sums, counts)
    return Interval(mean, _quantile(freedom) * error if freedom else math.nan)


def ratio_error(sums: Tensor, counts: Tensor) -> tuple[float, float, int]:
    """Return Σ sums/Σ counts, its standard error (NaN for a single group), and the number of groups with rows, less one."""
    sums, counts = sums[counts > 0].double(), counts[counts > 0].double()
    mean, freedom = (sums.sum() / counts.sum()).item(), len(sums) - 1
    if freedom < 1:
        return mean, math.nan, 0
    squares = (sums - mean * counts).square().sum().item()
    return mean, math.sqrt((freedom + 1) / freedom * squares) / counts.sum().item(), freedom


def difference_interval(first: Values, second: Values) -> Interval:
    """Return the mean of `first` less that of `second`, independent samples of at least two values each (Welch)."""
    samples = [torch.as_tensor(values, dtype=torch.float64).flatten() for values in (first, second)]
    a, b = (sample.var().item() / len(sample) for sample in samples)
    mean = (samples[0].mean() - samples[1].mean()).item()
    if not a + b:
        return Interval(mean, 0.0)
    freedom = (a + b) ** 2 / (a**2 / (len(samples[0]) - 1) + b**2 / (len(samples[1]) - 1))
    return Interval(mean, _quantile(freedom) * math.sqrt(a + b))


def jackknife(statistic: Callable[[Tensor], Tensor], groups: Tensor) -> Interval:
    """Return a statistic of sums over groups (G, …) with its jackknife interval."""
    total = groups.sum(0)
    used = groups[groups.flatten(1).abs().sum(1) > 0]
    number = len(used)
    mean = float(statistic(total))
    if number < 2:
        return Interval(mean, math.nan)
    left_out = statistic(total - used)
    variance = (number - 1) / number * (left_out - left_out.mean()).square().sum().item()
    return Interval(mean, _quantile(number - 1) * math.sqrt(variance))


def spearman_interval(x: Tensor, y: Tensor) -> Interval:
    """Return Spearman's rank correlation of two samples (N,) with its interval; N < 4 raises ValueError.

    It is that of Fisher's z = artanh r with the standard error √((1 + r²/2)/(N − 3)) (Bonett and Wright, 2000, Psychometrika
    65), carried back to r; of its two ends the one farther from r counts.
    """
    if len(x) < 4:
        raise ValueError(f"a rank correlation with an interval needs 4 values, not {len(x)}")
    r = float(spearman(x, y))
    inside = max(-1 + 1e-12, min(1 - 1e-12, r))
    error = 1.96 * math.sqrt((1 + inside**2 / 2) / (len(x) - 3))
    ends = [math.tanh(math.atanh(inside) + sign * error) for sign in (-1, 1)]
    return Interval(r, max(abs(end - r) for end in ends))


def _quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t."""
    from scipy.stats import t as student  # takes half a second, which a worker needs once, at its end

    return float(student.ppf(0.975, freedom))
