"""The results of an experiment as a figure: every measure with its intervals, or its course during training."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib

from jobs.studies.reproduction.experiment import Measure
from jobs.studies.reproduction.scoring import History
from jobs.studies.reproduction.table import StudyResult

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_MAX_NUM_PANELS = 4


def png(results: Sequence[StudyResult]) -> bytes:
    """Returns the content of a PNG file with the figure."""
    content, figure = io.BytesIO(), draw(results)
    figure.savefig(content, format="png", dpi=110)
    plt.close(figure)
    return content.getvalue()


def draw(results: Sequence[StudyResult]) -> Figure:
    """Draws a row of panels for every study that has random measures."""
    drawn = [result for result in results if _list_measures(result)]
    figure = plt.figure(figsize=(11, sum(map(_height, drawn))), layout="constrained")
    rows = figure.subfigures(len(drawn), 1, height_ratios=[_height(result) for result in drawn], squeeze=False)[:, 0]
    for row, result in zip(rows, drawn, strict=True):
        row.suptitle(result.study.title)
        if isinstance(result.study.scoring, History):
            _draw_course(row.subplots(), result)
            continue
        measures = _list_measures(result)[:_MAX_NUM_PANELS]
        panels = row.subplots(1, len(measures), squeeze=False, sharey=True)[0]
        for panel, measure in zip(panels, measures, strict=True):
            _draw_measure(panel, result, measure)
    return figure


def has_picture(results: Sequence[StudyResult]) -> bool:
    """Returns whether any study has random measures to draw."""
    return any(_list_measures(result) for result in results)


def _list_measures(result: StudyResult) -> list[Measure]:
    """Returns the random measures of a study, without exact ones, for which any arm has figures."""
    return [
        measure
        for measure in result.study.measures
        if not measure.is_exact and any(result.values(arm, measure) for arm in result.study.arms)
    ]


def _height(result: StudyResult) -> float:
    return 4.0 if isinstance(result.study.scoring, History) else 1.2 + 0.32 * len(result.study.arms)


def _draw_measure(panel: Axes, result: StudyResult, measure: Measure) -> None:
    """Draws every arm on its own line, from the top: seeds as points, mean and 95 % interval."""
    names = [arm.name for arm in result.study.arms]
    for height, arm in enumerate(result.study.arms):
        values = result.values(arm, measure)
        panel.plot(values, [height] * len(values), "o", color="tab:gray", alpha=0.5, markersize=4)
        if estimate := result.estimate(arm, measure):
            panel.errorbar(estimate.mean, height, xerr=estimate.half_width, fmt="D", color="tab:blue", capsize=3)
    panel.set(xlabel=measure.title, yticks=range(len(names)), yticklabels=names)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.grid(axis="x", alpha=0.3)


def _draw_course(panel: Axes, result: StudyResult) -> None:
    """Draws a line with intervals for every arm over the course of training."""
    measures = result.study.measures
    shares = [(number + 1) / len(measures) for number in range(len(measures))]
    for arm in result.study.arms:
        estimates = [result.estimate(arm, measure) for measure in measures]
        known = [(share, estimate) for share, estimate in zip(shares, estimates, strict=True) if estimate]
        panel.errorbar(
            [share for share, _ in known],
            [estimate.mean for _, estimate in known],
            yerr=[estimate.half_width for _, estimate in known],
            marker="o",
            capsize=3,
            label=arm.name,
        )
    panel.set(
        xlabel="share of the steps", ylabel=measures[-1].title.replace(f" after {len(measures)}/{len(measures)}", "")
    )
    panel.grid(alpha=0.3)
    panel.legend()
