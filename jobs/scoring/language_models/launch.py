"""Running an evaluation: Ray workers compute the unfinished units, finished ones are read, and a table is published."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from jobs.engine.cluster import CPU_ENVIRONMENT, check_resources, start_ray
from jobs.engine.console import clock
from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.language_models.errors import EvaluationFailedError
from jobs.scoring.language_models.plan import Plan, make_plan
from jobs.scoring.language_models.table import Column, make_columns, markdown
from jobs.scoring.language_models.units import Job, Ledger
from jobs.scoring.language_models.worker import EvaluationWorker, JobResult
from jobs.scoring.publishing import PublishedColumn, publish


def evaluate(config: EvaluateConfig) -> list[Column]:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the columns of the table.

    Raises:
        ValueError, OSError: before any work starts, see :func:`jobs.scoring.language_models.plan.make_plan`.
        EvaluationFailedError: naming every failed job, once all others have finished and the results are
            published.
    """
    plan = make_plan(config)
    ledger = Ledger(config.run.directory)
    left = [job for job in (_unfinished(job, ledger) for job in plan.jobs) if job.units]
    num_left = sum(len(job.units) for job in left)
    print(f"{len(plan.units)} units, {len(plan.units) - num_left} of them finished before; {config.run.directory}")
    failed: dict[str, str] = {}
    if left:
        start_ray()
        workers = config.workers
        check_resources(
            num_workers=workers.num_workers,
            cpus_per_worker=workers.cpus_per_worker,
            use_gpu=workers.use_gpu,
            data_cpus=0,
        )
        failed = _work_off(config, left, ledger)
    columns = make_columns(plan, ledger)
    _publish(plan, columns, failed)
    if failed:
        message = "\n".join(f"{title}: {reason}" for title, reason in failed.items())
        raise EvaluationFailedError(message, table=markdown(columns))
    return columns


def _unfinished(job: Job, ledger: Ledger) -> Job:
    return dataclasses.replace(job, units=tuple(unit for unit in job.units if ledger.read(unit) is None))


def _work_off(config: EvaluateConfig, jobs: list[Job], ledger: Ledger) -> dict[str, str]:
    """Run the jobs on a pool of workers, one job per worker at a time, and record each result as soon as it is there.

    Jobs are handed out in order, so that workers rarely change their model.

    Returns:
        title → reason for every job that failed; a failed job does not stop the others.
    """
    settings = dataclasses.replace(
        config,
        include_path=str(Path(config.include_path).resolve()) if config.include_path else "",
        data_dir=str(Path(config.data_dir).resolve()),
    )
    actor: Any = ray.remote(EvaluationWorker).options(
        num_cpus=config.workers.cpus_per_worker,
        num_gpus=1 if config.workers.use_gpu else 0,
        max_restarts=2,  # if a worker's machine is lost, Ray restarts the worker and retries its job
        max_task_retries=2,
        runtime_env={"env_vars": CPU_ENVIRONMENT},
    )
    waiting = deque(jobs)
    idle: list[Any] = [actor.remote(settings) for _ in range(min(config.workers.num_workers, len(jobs)))]
    running: dict[Any, tuple[Any, Job]] = {}
    failed: dict[str, str] = {}
    started, num_done = time.monotonic(), 0
    while waiting or running:
        while idle and waiting:
            worker, job = idle.pop(), waiting.popleft()
            running[worker.run.remote(job)] = (worker, job)
        (reference, *_), _ = ray.wait(list(running))
        worker, job = running.pop(reference)
        num_done += 1
        try:
            results, seconds = _result(reference)
        except (RayTaskError, RayActorError) as error:
            is_dead = isinstance(error, RayActorError)
            idle.append(actor.remote(settings) if is_dead and waiting else worker)
            failed[job.title] = _reason(error)
            print(f"FAILED  {job.title}: {failed[job.title]}", flush=True)
            continue
        for unit, result in zip(job.units, results, strict=True):
            ledger.write(unit, result, seconds)
        idle.append(worker)
        left = (time.monotonic() - started) / num_done * (len(jobs) - num_done)
        width = len(str(len(jobs)))
        print(
            f"job {num_done:>{width}}/{len(jobs)}  {job.title}  {seconds:.1f} s  {clock(left)} left",
            flush=True,
        )
    for worker in idle:
        ray.kill(worker)
    return failed


def _reason(error: RayTaskError | RayActorError) -> str:
    """Returns the reason why a job failed, in one line."""
    cause = getattr(error, "cause", None)
    if cause is None:  # the process died: the first line of Ray's message says so, and details follow
        return str(error).strip().splitlines()[0]
    return " ".join(f"{type(cause).__name__}: {cause}".split())


def _result(reference: Any) -> JobResult:
    return ray.get(reference)


def _publish(plan: Plan, columns: list[Column], failed: dict[str, str]) -> None:
    publish(
        plan.config,
        run=plan.config.run,
        tracking=plan.config.tracking,
        table=markdown(columns),
        columns=[
            PublishedColumn(
                title=column.title,
                parameters={
                    "model": column.model.path,
                    "tempnet": column.model.tempnet,
                    "temperature": column.temperature.name,
                },
                metrics=column.metrics,
            )
            for column in columns
        ],
        identity=[unit.key for unit in plan.units],
        failed=failed,
    )
