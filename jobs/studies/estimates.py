"""Means and paired differences over seeds, or over seeds and folds, with 95 % intervals by Student's t.

Accuracies of k-fold cross-validation are not independent: any two training sets share most of their sentences. The
variance of their mean is therefore taken as (1/n + n_test/n_train)·s² (Nadeau & Bengio 2003, "Inference for the
generalization error", the corrected resampled t-test), with n cells and n − 1 degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student_t


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval, and the two-sided p-value of the hypothesis that the mean is 0."""

    mean: float
    half_width: float
    """Half the width of the 95 % interval; NaN for a single value."""
    p: float

    def text(self, digits: int = 2, sign: str = "") -> str:
        """Returns the mean, with ± and half the width if there is one."""
        half = "" if math.isnan(self.half_width) else f" ± {self.half_width:.{digits}f}"
        return f"{self.mean:{sign},.{digits}f}{half}"


def estimate(values: Sequence[float], test_share: float = 0.0) -> Estimate:
    """Return the estimate of the mean of random figures, one per run.

    `test_share` is n_test/n_train if the training sets are folds and overlap: 1/(k − 1) for k folds; 0 if they do not.
    """
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Estimate(mean, math.nan, math.nan)
    error = math.sqrt((1.0 / n + test_share) * float(np.var(values, ddof=1)))
    if error == 0.0:
        return Estimate(mean, 0.0, 1.0 if mean == 0.0 else 0.0)
    return Estimate(
        mean, float(student_t.ppf(0.975, n - 1)) * error, 2.0 * float(student_t.sf(abs(mean) / error, n - 1))
    )
