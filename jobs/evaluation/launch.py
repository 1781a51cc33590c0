"""From a configuration to a table: the units that are not finished yet go to Ray workers, the rest is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from jobs.cluster import CPU_ENVIRONMENT, check_resources, start_ray
from jobs.evaluation.config import EvaluateConfig
from jobs.evaluation.plan import Plan, make_plan
from jobs.evaluation.table import Column, make_columns, markdown
from jobs.evaluation.units import Job, Ledger
from jobs.evaluation.worker import EvaluationWorker, JobResult
from jobs.training.identity import flatten
from jobs.training.tracking import TrackedRun, finish_run, open_run, survive_outage
from pipelines.archives import resolve


class EvaluationFailedError(RuntimeError):
    """A unit failed; what was finished before is kept."""


def evaluate(config: EvaluateConfig) -> list[Column]:
    """Run an evaluation to its end, or continue it; writes `results.md` and `results.json` and returns the columns.

    Raises:
        ValueError, OSError: before anything starts, see :func:`jobs.evaluation.plan.make_plan`.
        EvaluationFailedError: naming the unit that failed.
    """
    plan = make_plan(config)
    ledger = Ledger(config.run.directory)
    left = [job for job in (_unfinished(job, ledger) for job in plan.jobs) if job.units]
    num_left = sum(len(job.units) for job in left)
    print(f"{len(plan.units)} units, {len(plan.units) - num_left} of them finished before; {config.run.directory}")
    if left:
        start_ray()
        workers = config.workers
        check_resources(
            num_workers=workers.num_workers,
            cpus_per_worker=workers.cpus_per_worker,
            use_gpu=workers.use_gpu,
            data_cpus=0,
        )
        _work_off(config, left, ledger)
    columns = make_columns(plan, ledger)
    _publish(plan, columns)
    return columns


def _unfinished(job: Job, ledger: Ledger) -> Job:
    return dataclasses.replace(job, units=tuple(unit for unit in job.units if ledger.read(unit) is None))


def _work_off(config: EvaluateConfig, jobs: list[Job], ledger: Ledger) -> None:
    """Give every worker a job at a time, in order, so that models change seldom; record each as it ends."""
    settings = dataclasses.replace(
        config,
        include_path=str(Path(config.include_path).resolve()) if config.include_path else "",
        data_dir=str(Path(config.data_dir).resolve()),
    )
    actor: Any = ray.remote(EvaluationWorker).options(
        num_cpus=config.workers.cpus_per_worker,
        num_gpus=1 if config.workers.use_gpu else 0,
        max_restarts=2,  # a worker whose machine goes away starts again, and so does its job
        max_task_retries=2,
        runtime_env={"env_vars": CPU_ENVIRONMENT},
    )
    waiting = deque(jobs)
    idle: list[Any] = [actor.remote(settings) for _ in range(min(config.workers.num_workers, len(jobs)))]
    running: dict[Any, tuple[Any, Job]] = {}
    started, num_done = time.monotonic(), 0
    while waiting or running:
        while idle and waiting:
            worker, job = idle.pop(), waiting.popleft()
            running[worker.run.remote(job)] = (worker, job)
        (reference, *_), _ = ray.wait(list(running))
        worker, job = running.pop(reference)
        try:
            results, seconds = _result(reference)
        except (RayTaskError, RayActorError) as error:
            reason = str(getattr(error, "cause", None) or error).strip()
            raise EvaluationFailedError(f"{job.title}: {reason}") from error
        for unit, result in zip(job.units, results, strict=True):
            ledger.write(unit, result, seconds)
        idle.append(worker)
        num_done += 1
        left = (time.monotonic() - started) / num_done * (len(jobs) - num_done)
        width = len(str(len(jobs)))
        print(
            f"job {num_done:>{width}}/{len(jobs)}  {job.title}  {seconds:.1f} s  {int(left) // 60}:{int(left) % 60:02d} left",
            flush=True,
        )
    for worker in idle:
        ray.kill(worker)


def _result(reference: Any) -> JobResult:
    return ray.get(reference)


def _publish(plan: Plan, columns: list[Column]) -> None:
    """Write the results into the evaluation's directory, and into MLflow."""
    config = plan.config
    results = {
        "configuration": dataclasses.asdict(config),
        "columns": [
            {
                "model": column.model.path,
                "tempnet": column.model.tempnet or None,
                "temperature": column.temperature.name,
                "title": column.title,
                "metrics": {name: value if math.isfinite(value) else None for name, value in column.metrics.items()},
            }
            for column in columns
        ],
    }
    with tempfile.TemporaryDirectory() as name:
        local = Path(name)
        (local / "results.md").write_text(markdown(columns) + "\n", encoding="utf-8")
        (local / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False), encoding="utf-8")
        filesystem, path = resolve(config.run.directory)
        for file in local.iterdir():
            with filesystem.open_output_stream(f"{path}/{file.name}") as stream:
                stream.write(file.read_bytes())
        if plan.tracking_uri:
            with survive_outage("the evaluation"):
                _track(plan, columns, local)


def _track(plan: Plan, columns: list[Column], artifacts: Path) -> None:
    """A run for the evaluation, and under it one for every column; the same evaluation finds its runs again."""
    config = plan.config

    def run(name: str, identity: list[str], parameters: dict[str, Any], tags: dict[str, str]) -> TrackedRun:
        digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=6).hexdigest()
        return open_run(
            uri=plan.tracking_uri,
            experiment=config.tracking.experiment,
            name=name,
            directory=f"{config.run.directory}#{digest}",
            parameters=parameters,
            tags=tags,
            data_sets={},
        )

    keys = [unit.key for unit in plan.units]
    parent = run(config.name, keys, flatten(config), {})
    for column in columns:
        parameters = {
            "model": column.model.path,
            "tempnet": column.model.tempnet,
            "temperature": column.temperature.name,
        }
        child = run(column.title, [*keys, column.title], parameters, {"mlflow.parentRunId": parent.run_id})
        finish_run(child, status="FINISHED", artifacts=None, metrics=column.metrics, tags={})
    finish_run(parent, status="FINISHED", artifacts=artifacts, metrics={}, tags={})
