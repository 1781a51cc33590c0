"""Running an evaluation: workers compute the unfinished units, finished ones are read, and a table is published."""

from __future__ import annotations

import dataclasses
from functools import partial

from jobs.engine.fields import absolute_path
from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.language_models.plan import make_plan
from jobs.scoring.language_models.scoring import Score
from jobs.scoring.language_models.table import make_columns, markdown
from jobs.scoring.language_models.units import Job, Ledger
from jobs.scoring.language_models.worker import Evaluator
from jobs.scoring.results import Results, publish
from jobs.scoring.stages import Stages, run_stages


def evaluate(config: EvaluateConfig) -> Results:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the figures.

    Raises:
        ValueError, OSError: before any work starts, see :func:`jobs.scoring.language_models.plan.make_plan`.
        ScoringFailedError: naming every failed job, once all others have finished and the results are published.
    """
    plan = make_plan(config)
    ledger = Ledger(config.run.directory)
    left = [job for job in (_unfinished(job, ledger) for job in plan.jobs) if job.units]
    num_left = sum(len(job.units) for job in left)
    print(f"{len(plan.units)} units, {len(plan.units) - num_left} of them finished before; {config.run.directory}")

    def keep(job: Job, results: list[Score | dict[str, float]], seconds: float) -> None:
        for unit, result in zip(job.units, results, strict=True):
            ledger.write(unit, result, seconds)

    # The jobs of a model follow one another, so workers rarely change their model.
    stages: Stages[Job] = Stages(model=partial(Evaluator, _with_absolute_paths(config)))
    failed = run_stages(stages, left, config.workers, title=lambda job: job.title, keep=keep)
    return publish(
        config,
        columns=make_columns(plan, ledger),
        render=markdown,
        identity=[unit.key for unit in plan.units],
        failed=failed,
    )


def _unfinished(job: Job, ledger: Ledger) -> Job:
    return dataclasses.replace(job, units=tuple(unit for unit in job.units if ledger.read(unit) is None))


def _with_absolute_paths(config: EvaluateConfig) -> EvaluateConfig:
    """Returns the configuration for the workers, which have another working directory."""
    return dataclasses.replace(
        config,
        include_path=absolute_path(config.include_path),
        data_dir=absolute_path(config.data_dir or "."),
    )
