"""What an experiment found: the verdict on its claim, our table beside the paper's, and a figure.

A statement bounds a weighted sum of figures, which is formed seed by seed, so that what a seed does to all arms alike cancels
out. The statement

    holds                           if the 95 % interval of its mean over the seeds lies within the bound,
    does not hold                   if the interval lies outside,
    cannot be seen at this scale    otherwise, and if there is no interval (a single seed, no figures).

A claim holds if all its statements do, and does not hold if one of them does not. Intervals are not widened for the
number of statements: of 20 statements about equal arms, one is expected to be decided by chance.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jobs.engine.report import markdown_table
from jobs.studies.estimates import Estimate, estimate
from jobs.studies.reproduction.experiments import Arm, Measure, Scores, Statement, Study, difference
from jobs.studies.reproduction.plan import Reproduction
from jobs.studies.reproduction.scoring import History

Verdict = Literal["holds", "does not hold", "cannot be seen at this scale"]
UNSEEN: Verdict = "cannot be seen at this scale"

Replicates = Mapping[str, Mapping[str, Scores]]
"""Arm → name of the replicate (its seed, and fold) → scores."""

_MAX_NUM_PANELS = 4
_BASELINE = "cross-entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    statement: Statement
    estimate: Estimate | None
    """Estimate of the weighted sum; None if no seed has all of its figures."""
    num_replicates: int
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    study: Study
    replicates: Replicates
    judged: Sequence[Judged]
    test_share: float

    @classmethod
    def of(cls, study: Study, replicates: Replicates, test_share: float = 0.0) -> StudyResult:
        measures = {measure.name: measure for measure in study.measures}
        judged = [judge(one, replicates, measures, test_share=test_share) for one in study.statements]
        return cls(study=study, replicates=replicates, judged=judged, test_share=test_share)

    @property
    def is_course(self) -> bool:
        """Whether the measures are points of a curve, over the course of training or over an axis."""
        return bool(self.study.axis) or isinstance(self.study.scoring, History)

    def values(self, arm: Arm, measure: Measure) -> list[float]:
        """Return the values of a measure, for all replicates of an arm; NaN where one has none."""
        return [measure.value(scores) for scores in self.replicates.get(arm.name, {}).values()]

    def finite(self, arm: Arm, measure: Measure) -> list[float]:
        return [value for value in self.values(arm, measure) if math.isfinite(value)]

    def estimate(self, arm: Arm, measure: Measure) -> Estimate | None:
        """Return the mean of a table cell with its interval; None if one of its replicates has diverged."""
        return summarize(self.values(arm, measure), test_share=self.test_share, is_exact=measure.is_exact)


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
    """Judge a statement by the figures of the replicates that all its arms have."""
    weights = statement.weights.items()
    common = set.intersection(*(set(replicates.get(arm, {})) for (arm, _), _ in weights))
    sums = [
        math.fsum(weight * measures[measure].value(replicates[arm][name]) for (arm, measure), weight in weights)
        for name in sorted(common)
    ]
    is_exact = all(measures[measure].is_exact for (_, measure), _ in weights)
    total, verdict = summarize(sums, test_share=test_share, is_exact=is_exact), UNSEEN
    if total is not None:  # comparisons with NaN, the width of a single value, are false
        lower, upper = total.mean - total.half_width, total.mean + total.half_width
        if statement.low < lower and upper < statement.high:
            verdict = "holds"
        elif upper <= statement.low or statement.high <= lower:
            verdict = "does not hold"
    return Judged(statement=statement, estimate=total, num_replicates=len(sums), verdict=verdict)


def judge_claim(judged: Sequence[Judged], *, num_left_out: int = 0) -> Verdict:
    """Returns the verdict on a claim by all its statements; those that were left out, and none at all, cannot be seen."""
    verdicts = {statement.verdict for statement in judged} | ({UNSEEN} if num_left_out else set())
    if "does not hold" in verdicts:
        return "does not hold"
    return "holds" if verdicts == {"holds"} else UNSEEN


def verdict_of_claim(work: Reproduction, results: Sequence[StudyResult]) -> Verdict:
    return judge_claim([judged for result in results for judged in result.judged], num_left_out=work.num_left_out)


def as_markdown(work: Reproduction, results: Sequence[StudyResult], failed: Mapping[str, str]) -> str:
    config, experiment = work.config, work.experiment
    seeds = "1 seed" if config.seeds == 1 else f"{config.seeds} seeds"
    steps = f", at most {config.steps:,} steps a run" if config.steps else ""
    lines = [
        f"# {experiment.id}: {experiment.title} ({experiment.source})",
        "",
        f"Claim: {experiment.claim}. Scale: {config.scale}, {seeds}{steps}.",
    ]
    for result in results:
        lines += ["", f"## {result.study.title}", "", _figures(result)]
        if found := gains(result):
            lines += ["", _gains(found)]
        if result.judged:
            lines += ["", _statements(result)]
        lines += ["", *result.study.notes] if result.study.notes else []
    for name, reason in failed.items():
        lines += ["", f"FAILED: {name}: {reason}"]
    verdict = verdict_of_claim(work, results)
    so_far = ", as far as the statements above go" if verdict == "holds" else ""
    lines += ["", f"**The claim {verdict}{so_far}.**", ""]
    if work.num_left_out:
        lines += [f"{work.num_left_out} of its statements were left out by --arms.", ""]
    lines += [
        "± is half the 95 % interval by Student's t over the replicates (seeds, folds of a cross-validation). A statement "
        "holds if the interval of its figure, formed replicate by replicate, lies within the bound, does not hold if it "
        "lies outside, and cannot be seen otherwise; the claim holds if all statements do, and does not if one does not.",
    ]
    return "\n".join(lines)


def _figures(result: StudyResult) -> str:
    study = result.study
    rows = [["setting", *(f"paper: {column}" for column in study.columns), *(one.title for one in study.measures)]]
    for arm in study.arms:
        row = arm.row or arm.name
        title = arm.name if row == arm.name else f"{arm.name} (paper: {row})"
        paper = ["" if math.isnan(value) else f"{value:g}" for value in arm.paper] or [""] * len(study.columns)
        found = [(result.estimate(arm, measure), measure.digits) for measure in study.measures]
        ours = [one.text(digits) if one else "–" for one, digits in found]
        rows.append([title, *paper, *ours])
    return markdown_table(rows)


class Gain(NamedTuple):
    """What a loss gains over cross-entropy on a data set, in points; NaN for the paper's gain where it has none."""

    data: str
    loss: str
    num_sentences: float
    estimate: Estimate
    paper: float


def gains(result: StudyResult) -> list[Gain]:
    """Returns the gains of a study's arms named `DATA, LOSS` over `DATA, cross-entropy`, paired replicate by replicate."""
    found, arms = [], {arm.name: arm for arm in result.study.arms}
    for name, arm in arms.items():
        data, _, loss = name.rpartition(", ")
        baseline = arms.get(f"{data}, {_BASELINE}")
        if baseline is None or loss == _BASELINE:
            continue
        (measure,) = result.study.measures
        statement = Statement(text="", weights=difference(name, baseline.name, measure.name))
        judged = judge(statement, result.replicates, {measure.name: measure}, test_share=result.test_share)
        if judged.estimate is not None:
            scores = next(iter(result.replicates[name].values()))
            size = scores.get("num_train", math.nan) + scores.get("num_held_out", math.nan)
            paper = arm.paper[0] - baseline.paper[0] if arm.paper and baseline.paper else math.nan
            found.append(Gain(data, loss, size, judged.estimate, paper))
    return found


def _gains(found: Sequence[Gain]) -> str:
    losses = list(dict.fromkeys(gain.loss for gain in found))
    rows = [["data", "sentences", *(f"{what} of {one}" for one in losses for what in ("paper: gain", "gain"))]]
    for data in dict.fromkeys(gain.data for gain in found):
        own = {gain.loss: gain for gain in found if gain.data == data}
        cells = [
            (own[loss].paper, own[loss].estimate.text(2, "+")) if loss in own else (math.nan, "–") for loss in losses
        ]
        texts = [text for paper, ours in cells for text in ("" if math.isnan(paper) else f"{paper:+.2f}", ours)]
        rows.append([data, f"{next(iter(own.values())).num_sentences:,.0f}", *texts])
    return markdown_table(rows)


def _statements(result: StudyResult) -> str:
    rows = [["statement", "found", "bound", "replicates", "verdict"]]
    for judged in result.judged:
        found, bound = _found_and_bound(judged, result.study)
        rows.append([judged.statement.text, found, bound, str(judged.num_replicates), judged.verdict])
    return markdown_table(rows)


def _found_and_bound(judged: Judged, study: Study) -> tuple[str, str]:
    """Returns, as text, the figure of a statement with its interval, and the bound that it must lie in."""
    digits = {measure.name: measure.digits for measure in study.measures}
    weights, low, high = judged.statement.weights, judged.statement.low, judged.statement.high
    num_digits = max(digits[measure] for _, measure in weights)
    found = judged.estimate.text(num_digits, "+" if len(weights) > 1 else "") if judged.estimate else "–"
    return found, f"> {low:,.10g}" if high == math.inf else f"{low:,.10g} to {high:,.10g}"


def as_content(work: Reproduction, results: Sequence[StudyResult]) -> dict[str, Any]:
    """Returns the content of `results.json`: all figures of all runs, the paper's figures, statements and verdicts."""
    return {
        "experiment": {"id": work.experiment.id, "source": work.experiment.source, "claim": work.experiment.claim},
        "verdict": verdict_of_claim(work, results),
        "studies": [_study_content(work, result) for result in results],
    }


def _study_content(work: Reproduction, result: StudyResult) -> dict[str, Any]:
    study = result.study
    runs = next(planned.runs for planned in work.studies if planned.study is study)
    steps = {run.arm.name: {"run.num_steps": run.config.run.num_steps} for run in runs}
    arms = []
    for arm in study.arms:
        found = {measure: one for measure in study.measures if (one := result.estimate(arm, measure))}
        figures = {
            measure.name: {"mean": one.mean, "half_width": one.half_width, "values": result.finite(arm, measure)}
            for measure, one in found.items()
        }
        arms.append(
            {
                "name": arm.name,
                "paper_row": arm.row or arm.name,
                "preset": arm.preset,
                "changes": {**study.changes, **work.config.changes, **arm.changes, **steps.get(arm.name, {})},
                "after": arm.after,
                "runs": {run.replicate: run.name for run in runs if run.arm.name == arm.name},
                "figures": figures,
            }
        )
    rows = {arm.row or arm.name: arm.paper for arm in study.arms if arm.paper}
    statements = [
        {
            **{name: getattr(judged.statement, name) for name in ("text", "low", "high")},
            **{name: getattr(judged.estimate, name, None) for name in ("mean", "half_width")},
            "num_replicates": judged.num_replicates,
            "verdict": judged.verdict,
            "as_text": _found_and_bound(judged, study),
        }
        for judged in result.judged
    ]
    paper = {"columns": study.columns, "rows": rows}
    return {"title": study.title, "paper": paper, "arms": arms, "statements": statements, "notes": study.notes}


def as_png(results: Sequence[StudyResult]) -> bytes | None:
    """Returns the content of a PNG file with the figure; None if there is nothing to draw."""
    content, figure = io.BytesIO(), draw(results)
    if figure is None:
        return None
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def draw(results: Sequence[StudyResult]) -> Figure | None:
    """Draw a row of panels for every study that has random measures; return None if none has."""
    drawn: list[tuple[StudyResult, list[Measure]]] = []
    for result in results:
        arms, shown = result.study.arms, [one for one in result.study.measures if result.study.axis or not one.is_exact]
        if measures := [one for one in shown if any(result.finite(arm, one) for arm in arms)]:
            drawn.append((result, measures[:_MAX_NUM_PANELS]))
    if not drawn:
        return None
    heights = [4.0 if result.is_course else 1.2 + 0.32 * len(result.study.arms) for result, _ in drawn]
    found = [gain for result in results for gain in gains(result)]
    if len({gain.num_sentences for gain in found}) > 1:
        heights.append(4.0)
    figure = Figure((11, sum(heights)), layout="constrained")
    rows = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for row, (result, measures) in zip(rows[: len(drawn)], drawn, strict=True):
        row.suptitle(result.study.title)
        if result.is_course:
            _draw_course(row.subplots(), result)
            continue
        for panel, measure in zip(row.subplots(1, len(measures), squeeze=False, sharey=True)[0], measures, strict=True):
            _draw_measure(panel, result, measure)
    if len(heights) > len(drawn):
        _draw_gains(rows[-1].subplots(), found)
    return figure


def _draw_gains(panel: Axes, found: Sequence[Gain]) -> None:
    """Draws the gains over the number of sentences, with their intervals, and the paper's as crosses."""
    for number, loss in enumerate(dict.fromkeys(gain.loss for gain in found)):
        own = [gain for gain in found if gain.loss == loss]
        sizes, means = [gain.num_sentences for gain in own], [gain.estimate.mean for gain in own]
        widths, color = [gain.estimate.half_width for gain in own], f"C{number}"
        panel.errorbar(sizes, means, yerr=widths, fmt="o", capsize=3, color=color, label=loss)
        panel.plot(sizes, [gain.paper for gain in own], "x", color=color, label=f"{loss}, paper")
        for gain in own:
            panel.annotate(gain.data, (gain.num_sentences, gain.estimate.mean), fontsize=7)
    panel.axhline(0.0, color="tab:gray", linewidth=0.8)
    panel.set(xscale="log", xlabel="sentences", ylabel="gain over cross-entropy, points")
    panel.grid(alpha=0.3)
    panel.legend()


def _draw_measure(panel: Axes, result: StudyResult, measure: Measure) -> None:
    """Draws every arm on its own line, from the top: seeds as points, mean and 95 % interval."""
    names = [arm.name for arm in result.study.arms]
    for height, arm in enumerate(result.study.arms):
        values = result.finite(arm, measure)
        panel.plot(values, [height] * len(values), "o", color="tab:gray", alpha=0.5, markersize=4)
        if estimate := result.estimate(arm, measure):
            panel.errorbar(estimate.mean, height, xerr=estimate.half_width, fmt="D", color="tab:blue", capsize=3)
    panel.set(xlabel=measure.title, yticks=range(len(names)), yticklabels=names)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.grid(axis="x", alpha=0.3)


def _draw_course(panel: Axes, result: StudyResult) -> None:
    """Draws a line with intervals for every arm over the course of training, or over the axis of a curve."""
    measures, axis = result.study.measures, result.study.axis
    for arm in result.study.arms:
        estimates = [result.estimate(arm, measure) for measure in measures]
        points = [
            (measure.place if axis else (number + 1) / len(measures), one.mean, 0.0 if axis else one.half_width)
            for number, (measure, one) in enumerate(zip(measures, estimates, strict=True))
            if one
        ]
        shares, means, half_widths = zip(*points, strict=True) if points else ((), (), ())
        panel.errorbar(shares, means, yerr=half_widths, marker="o", capsize=3, label=arm.name)
    title = measures[-1].title.replace(f" after {len(measures)}/{len(measures)}", "")
    if axis:
        panel.set(xlabel=axis, ylabel=result.study.title.partition(" (")[0], yscale="log")
    else:
        panel.set(xlabel="share of the steps", ylabel=title)
    panel.grid(alpha=0.3)
    panel.legend()
