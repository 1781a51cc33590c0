"""Means over seeds with their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student_t


def interval(values: Sequence[float]) -> str:
    """Mean ± half the width of the 95 % interval by Student's t; a dash where there is no value."""
    mean = statistics.fmean(values)
    if math.isnan(mean):
        return "–"
    if len(values) < 2:
        return f"{mean:.4g}"
    half = student_t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.4g} ± {half:.2g}"
