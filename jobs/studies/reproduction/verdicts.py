"""The rule that decides whether a claim holds, which is the same for all experiments.

A statement bounds a weighted sum of figures. The sum is formed seed by seed, so that what a seed does to all arms alike
cancels out (as in a paired difference; the sum may also be a single figure or a difference of differences). The
statement

    holds                           if the 95 % interval of its mean over the seeds lies within the bound,
    does not hold                   if the interval lies outside,
    cannot be seen at this scale    otherwise, and if there is no interval (a single seed, no figures).

A claim holds if all its statements do, and does not hold if one of them does not. Intervals are not widened for the
number of statements: of 20 statements about equal arms, one is expected to be decided by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jobs.studies.estimates import Estimate, estimate
from jobs.studies.reproduction.experiment import Measure, Scores, Statement

Verdict = Literal["holds", "does not hold", "cannot be seen at this scale"]
UNSEEN: Verdict = "cannot be seen at this scale"

Replicates = Mapping[str, Mapping[str, Scores]]
"""Arm → name of the replicate (its seed, and fold) → scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A statement with its estimate and verdict."""

    statement: Statement
    estimate: Estimate | None
    """Estimate of the weighted sum; None if no seed has all of its figures."""
    num_replicates: int
    verdict: Verdict


def summarize(values: Sequence[float], *, test_share: float = 0.0, is_exact: bool = False) -> Estimate | None:
    """Returns the mean of figures with its interval, or None if there are no figures or one of them is not finite."""
    if not values or not all(map(math.isfinite, values)):
        return None
    if is_exact and len(set(values)) == 1:
        return Estimate(values[0], 0.0, math.nan)
    return estimate(values, test_share)


def judge(
    statement: Statement, replicates: Replicates, measures: Mapping[str, Measure], *, test_share: float = 0.0
) -> Judged:
    """Judge a statement by the figures.

    Args:
        statement: the statement.
        replicates: the scores of all arms.
        measures: name → measure.
        test_share: as in `jobs.studies.estimates.estimate`.
    """
    arms = {arm for arm, _ in statement.weights}
    common = set.intersection(*(set(replicates.get(arm, {})) for arm in arms))
    sums = [
        math.fsum(
            weight * measures[measure].value(replicates[arm][name])
            for (arm, measure), weight in statement.weights.items()
        )
        for name in sorted(common)
    ]
    is_exact = all(measures[measure].is_exact for _, measure in statement.weights)
    total = summarize(sums, test_share=test_share, is_exact=is_exact)
    return Judged(
        statement=statement, estimate=total, num_replicates=len(sums), verdict=judge_estimate(statement, total)
    )


def judge_estimate(statement: Statement, total: Estimate | None) -> Verdict:
    """Returns the verdict on a statement by the estimate of its weighted sum."""
    if total is None or math.isnan(total.half_width):
        return UNSEEN
    lower, upper = total.mean - total.half_width, total.mean + total.half_width
    if statement.low < lower and upper < statement.high:
        return "holds"
    if upper <= statement.low or statement.high <= lower:
        return "does not hold"
    return UNSEEN


def judge_claim(judged: Sequence[Judged], *, num_left_out: int = 0) -> Verdict:
    """Returns the verdict on all statements of a claim; without any statement, nothing can be seen.

    Args:
        judged: the judged statements.
        num_left_out: number of statements whose arms were not run, which count as not seen.
    """
    verdicts = {statement.verdict for statement in judged} | ({UNSEEN} if num_left_out else set())
    if "does not hold" in verdicts:
        return "does not hold"
    return "holds" if verdicts == {"holds"} else UNSEEN
