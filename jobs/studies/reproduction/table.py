"""The paper's table beside ours, and the verdict on the claim, as Markdown and JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.engine.description import markdown_table
from jobs.studies.estimates import Estimate
from jobs.studies.reproduction.experiment import Arm, Measure, Study
from jobs.studies.reproduction.plan import Reproduction
from jobs.studies.reproduction.verdicts import Judged, Replicates, Verdict, judge_claim, summarize


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """A study with its figures and verdicts."""

    study: Study
    replicates: Replicates
    judged: Sequence[Judged]
    test_share: float

    def values(self, arm: Arm, measure: Measure) -> list[float]:
        """Returns the values of a measure, for all replicates of an arm that have it."""
        values = [measure.value(scores) for scores in self.replicates.get(arm.name, {}).values()]
        return [value for value in values if math.isfinite(value)]

    def estimate(self, arm: Arm, measure: Measure) -> Estimate | None:
        """Returns the mean of a table cell with its interval."""
        return summarize(self.values(arm, measure), test_share=self.test_share, is_exact=measure.is_exact)


def as_markdown(work: Reproduction, results: Sequence[StudyResult], failed: Mapping[str, str]) -> str:
    """Returns the whole report in Markdown."""
    config, experiment = work.config, work.experiment
    seeds = "1 seed" if config.seeds == 1 else f"{config.seeds} seeds"
    steps = f", {config.steps:,} steps a run" if config.steps else ""
    lines = [
        f"# {experiment.id}: {experiment.title} ({experiment.source})",
        "",
        f"Claim: {experiment.claim}. Scale: {config.scale}, {seeds}{steps}.",
    ]
    for result in results:
        lines += ["", f"## {result.study.title}", "", _figures(result)]
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


def verdict_of_claim(work: Reproduction, results: Sequence[StudyResult]) -> Verdict:
    """Returns the verdict on the claim, from all its statements."""
    return judge_claim([judged for result in results for judged in result.judged], num_left_out=work.num_left_out)


def as_content(work: Reproduction, results: Sequence[StudyResult]) -> dict[str, Any]:
    """Returns the content of `results.json`: all figures of all runs, the paper's figures, statements and verdicts."""
    return {
        "configuration": dataclasses.asdict(work.config),
        "experiment": {"id": work.experiment.id, "source": work.experiment.source, "claim": work.experiment.claim},
        "verdict": verdict_of_claim(work, results),
        "studies": [_study_content(work, result) for result in results],
    }


def _figures(result: StudyResult) -> str:
    study = result.study
    rows = [
        [
            "setting",
            *(f"paper: {column}" for column in study.table.columns),
            *(measure.title for measure in study.measures),
        ]
    ]
    missing = (math.nan,) * len(study.table.columns)
    for arm in study.arms:
        row = arm.row or arm.name
        paper = study.table.rows.get(row, missing)
        title = arm.name if row == arm.name else f"{arm.name} (paper: {row})"
        ours = [_format(result.estimate(arm, measure), measure.digits) for measure in study.measures]
        rows.append([title, *("" if math.isnan(value) else f"{value:g}" for value in paper), *ours])
    return markdown_table(rows)


def _statements(result: StudyResult) -> str:
    rows = [["statement", "found", "bound", "replicates", "verdict"]]
    for judged in result.judged:
        statement = judged.statement
        digits = max(num_digits(result, measure) for _, measure in statement.weights)
        total = _format(judged.estimate, digits, sign="+" if len(statement.weights) > 1 else "")
        bound = _format_bound(statement.low, statement.high)
        rows.append([statement.text, total, bound, str(judged.num_replicates), judged.verdict])
    return markdown_table(rows)


def num_digits(result: StudyResult, name: str) -> int:
    """Returns the number of digits with which a measure is shown, by its name."""
    return next(measure.digits for measure in result.study.measures if measure.name == name)


def _format_bound(low: float, high: float) -> str:
    if high == math.inf:
        return f"> {low:,.10g}"
    return f"{low:,.10g} to {high:,.10g}"


def _format(value: Estimate | None, digits: int, *, sign: str = "") -> str:
    if value is None:
        return "–"
    half = "" if math.isnan(value.half_width) else f" ± {value.half_width:.{digits}f}"
    return f"{value.mean:{sign},.{digits}f}{half}"


def _study_content(work: Reproduction, result: StudyResult) -> dict[str, Any]:
    study = result.study
    planned = next(planned for planned in work.studies if planned.study is study)
    return {
        "title": study.title,
        "paper": {"columns": study.table.columns, "rows": study.table.rows},
        "arms": [
            {
                "name": arm.name,
                "paper_row": arm.row or arm.name,
                "preset": arm.preset,
                "changes": {**study.changes, **work.config.changes, **arm.changes},
                "after": arm.after,
                "runs": {run.replicate.name: run.name for run in planned.runs if run.arm.name == arm.name},
                "figures": {
                    measure.name: {
                        "mean": estimate.mean,
                        "half_width": estimate.half_width,
                        "values": result.values(arm, measure),
                    }
                    for measure in study.measures
                    if (estimate := result.estimate(arm, measure))
                },
            }
            for arm in study.arms
        ],
        "statements": [
            {
                "text": judged.statement.text,
                "low": judged.statement.low,
                "high": judged.statement.high,
                "mean": judged.estimate.mean if judged.estimate else None,
                "half_width": judged.estimate.half_width if judged.estimate else None,
                "num_replicates": judged.num_replicates,
                "verdict": judged.verdict,
            }
            for judged in result.judged
        ],
        "notes": study.notes,
    }
