"""Running an experiment: checks, data preparation, runs in the order of their dependencies, scores and verdicts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.engine.cluster import check_machine, start_ray
from jobs.engine.config import TrackingSection
from jobs.engine.launch import check_directory, claim_directory, make_plan
from jobs.engine.task import Plan
from jobs.engine.tracking import mark_if_ended
from jobs.scoring.config import LanguageModelPool
from jobs.studies.reproduction.experiments import Measure, Scores
from jobs.studies.reproduction.plan import PlannedStudy, Reproduction, Run, list_needed_paths, locate, outcome_of
from jobs.studies.reproduction.report import Replicates, StudyResult, as_content, as_markdown, as_png, verdict_of_claim
from jobs.studies.reproduction.scoring import FinishedRun
from jobs.studies.trials import (
    Outcomes,
    Results,
    Trial,
    describe_data,
    open_parent,
    prepare_once,
    publish,
    run_trials,
)
from pipelines.storage import exists

_NUM_SIDE_BY_SIDE = 16
_VERDICT_NUMBERS = {"holds": 1.0, "cannot be seen at this scale": 0.0, "does not hold": -1.0}


def check_reproduction(work: Reproduction) -> None:
    """Check that an experiment can be started; what data it lacks is a part of its description."""
    check_directory(work.config)
    check_machine()


def run_reproduction(work: Reproduction) -> Results[StudyResult]:
    """Run or continue an experiment, and write `results.md`, `results.json` and `figures.png` into its directory."""
    config = work.config
    check_reproduction(work)
    print(work.describe() + "\n", flush=True)
    plans = _check(work)
    claim_directory(config)
    outcomes, data_sets = Outcomes(finished={}, failed={}), {}
    is_scored = any(planned.study.scoring for planned in work.studies)
    if is_scored or any(outcome_of(run) is None for run in work.runs.values()):
        start_ray()
        data_sets = prepare_once(plans)
    parent = open_parent(
        config,
        dataclasses.replace(config.tracking, paper=config.tracking.paper or work.experiment.source),
        uri=work.tracking_uri,
        num_trials=len(work.runs),
        data_sets=data_sets,
    )
    with mark_if_ended(parent):
        if work.runs:
            # The measures of the study that a run is made for; others may not apply to it.
            measures = {run.name: planned.study.measures for planned in work.studies for run in planned.runs}
            outcomes = run_trials(
                [Trial(config=run.config, after=run.after) for run in work.runs.values()],
                directory=config.run.directory,
                parent=parent,
                describe=lambda outcome: _describe_outcome(outcome, measures[outcome["run"]]),
                num_concurrent=config.num_concurrent,
                data_cpus=max(plan.data_cpus for plan in plans),
                num_side_by_side=_NUM_SIDE_BY_SIDE,
            )
        results = [
            StudyResult.of(
                planned.study,
                _measure(work, planned) if planned.study.direct else _score_runs(work, planned, outcomes),
                planned.test_share,
            )
            for planned in work.studies
        ]
        verdict = verdict_of_claim(work, results)
        return publish(
            config,
            parent,
            rows=results,
            table=as_markdown(work, results, outcomes.failed),
            content=as_content(work, results),
            files={"figures.png": picture} if (picture := as_png(results)) else {},
            metrics={"verdict": _VERDICT_NUMBERS[verdict], "num_failed": len(outcomes.failed)},
            failed=outcomes.failed,
        )


def scores_of(outcome: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a run's outcome: `validation/<score>`, `rivals/<figure>`, and other numbers by name."""
    scores = {name: float(value) for name, value in outcome.items() if isinstance(value, int | float)}
    for section in ("validation", "rivals"):
        scores |= {f"{section}/{name}": float(value) for name, value in outcome.get(section, {}).items()}
    return scores


def _check(work: Reproduction) -> list[Plan]:
    """Returns the plan of every arm's first run with the same data, but for those that start from a run not made yet."""
    for name, path in work.scoring_data.items():
        if path and not exists(path):
            raise FileNotFoundError(
                f"data: {name} = {path!r} does not exist, and models are scored on it: use --data {name}=PATH"
            )
    first = {
        (number, run.arm.name, describe_data(run.config)): run
        for number, planned in enumerate(work.studies)
        for run in planned.runs[::-1]
    }
    by_name = {run.name: run for run in first.values()}

    def can_start(run: Run) -> bool:
        return not run.after or exists(work.runs[run.after].config.run.export_directory)

    plans = [make_plan(run.config) for run in by_name.values() if can_start(run)]
    for field, paths in list_needed_paths([run.config for run in work.runs.values()]).items():
        for path in paths:
            if locate(field, path) == "MISSING":
                raise FileNotFoundError(f"{field} = {path!r} does not exist: use --change {field}=PATH")
    return plans


def _measure(work: Reproduction, planned: PlannedStudy) -> Replicates:
    assert planned.study.direct is not None
    found = {str(seed): planned.study.direct(work.config.scale, seed) for seed in range(work.config.seeds)}
    return {arm.name: {seed: scores[arm.name] for seed, scores in found.items()} for arm in planned.study.arms}


def _score_runs(work: Reproduction, planned: PlannedStudy, outcomes: Outcomes) -> Replicates:
    study, done = planned.study, outcomes.finished
    finished = {run.name: FinishedRun(run.config, done[run.name]) for run in planned.runs if run.name in done}
    scores: dict[str, dict[str, float]] = {name: scores_of(run.outcome) for name, run in finished.items()}
    # Runs that others start from may not be rows of the table, and may be of another kind.
    bases = {arm.after for arm in study.arms}
    rows = {run.name for run in planned.runs if run.arm.name not in bases}
    wanted = [run for name, run in finished.items() if name in rows]
    if study.scoring and wanted:
        workers = LanguageModelPool(num_workers=2, cpus_per_worker=0.5)
        if wanted[0].config.workers.use_gpu:
            workers = LanguageModelPool(num_workers=4, use_gpu=True)
        found = study.scoring.scores(
            wanted,
            {name: path for name, path in work.scoring_data.items() if name in study.scoring.data},
            storage=work.config.run.directory,
            workers=workers,
            tracking=TrackingSection(enabled=False),
        )
        for name, more in found.items():
            scores[name] |= more
    replicates: dict[str, dict[str, Scores]] = {}
    for run in planned.runs:
        if run.name in scores:
            replicates.setdefault(run.arm.name, {})[run.replicate] = scores[run.name]
    return replicates


def _describe_outcome(outcome: Mapping[str, Any], measures: Sequence[Measure]) -> str:
    scores = scores_of(outcome)
    values = [(measure, measure.value(scores)) for measure in measures]
    return ", ".join(f"{one.title} {value:.{one.digits}f}" for one, value in values if math.isfinite(value))
