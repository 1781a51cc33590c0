"""Running an evaluation: workers compute the unfinished units, finished ones are read, and a table is published."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from jobs.engine.fields import absolute_path
from jobs.engine.tracking import resolve_uri
from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.language_models.plan import make_plan
from jobs.scoring.language_models.table import make_columns, markdown
from jobs.scoring.language_models.units import Job, unit_store
from jobs.scoring.language_models.worker import Evaluator
from jobs.scoring.results import Results, publish_evaluation
from jobs.scoring.units import Work, map_units


def evaluate(config: EvaluateConfig) -> Results:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the figures.

    Raises:
        ValueError, OSError: before any work starts, see :func:`jobs.scoring.language_models.plan.make_plan`.
        ScoringFailedError: naming every failed job, once all others have finished and the results are published.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    plan = make_plan(config)
    store = unit_store(config.run.directory)
    finished = store.names()
    jobs = [replace(job, units=tuple(unit for unit in job.units if unit.file not in finished)) for job in plan.jobs]
    left = [job for job in jobs if job.units]
    num_left = sum(len(job.units) for job in left)
    print(f"{len(plan.units)} units, {len(plan.units) - num_left} of them finished before; {config.run.directory}")
    # The workers have another working directory. The jobs of a model follow one another, so they rarely change it.
    absolute = replace(
        config, include_path=absolute_path(config.include_path), data_dir=absolute_path(config.data_dir or ".")
    )
    work: Work[Job] = Work(model=partial(Evaluator, absolute), title=lambda job: job.title)
    failed = map_units(left, work, config.workers, store).failed
    return publish_evaluation(
        config,
        uri=uri,
        columns=make_columns(plan, store),
        render=markdown,
        identity=[unit.key for unit in plan.units],
        failed=failed,
    )
