"""Running an evaluation: Ray workers compute the unfinished cells, finished ones are read, and a table is published."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from jobs.engine.cluster import CPU_ENVIRONMENT, check_resources, start_ray
from jobs.engine.console import clock
from jobs.engine.named_values import named_values
from jobs.engine.tracking import resolved_uri
from jobs.scoring.labels import model_labels
from jobs.scoring.language_models.config import EvaluationWorkersSection
from jobs.scoring.language_models.errors import EvaluationFailedError
from jobs.scoring.publishing import PublishedColumn, publish
from jobs.scoring.sentence_encoders.cells import Cell, ModelSpec, cells, compute
from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig
from jobs.scoring.sentence_encoders.table import Column, markdown
from pipelines.problems import TooManyProblemsError
from pipelines.sentences.senteval import Judgements, SentenceTask, read_judgements, read_task
from pipelines.storage import resolve, write_json


def evaluate(config: EvaluateSentencesConfig) -> list[Column]:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the columns of the table.

    Raises:
        ValueError, OSError: naming the field and the value, before any work starts.
        TooManyProblemsError: if too large a share of the data is unreadable.
        EvaluationFailedError: if a cell failed.
    """
    _ = resolved_uri(config.tracking, config.run.resolved_storage)
    data = read_data(config)
    models = [ModelSpec.read(*one, config) for one in zip(model_labels(config.models), config.models, strict=True)]
    wanted = cells(config, models, data)
    directory = config.run.directory
    left = [cell for cell in wanted if cell.stored(directory) is None]
    print(f"{len(wanted)} cells, {len(wanted) - len(left)} of them finished before; {directory}", flush=True)
    if left:
        filesystem, path = resolve(f"{directory}/cells")
        filesystem.create_dir(path, recursive=True)
        _compute_all(config, left)
    columns = []
    for model in models:
        metrics = {
            f"{cell.data.name}/{name}": value
            for cell in wanted
            if cell.model == model
            for name, value in (cell.stored(directory) or {}).items()
        }
        metrics |= {f"{one.name}/num_unreadable": sum(one.problems.values()) for one in data}
        columns.append(Column(model=model, metrics=metrics))
    publish(
        config,
        run=config.run,
        tracking=config.tracking,
        table=markdown(columns),
        columns=[
            PublishedColumn(title=column.model.label, parameters={"model": column.model.path}, metrics=column.metrics)
            for column in columns
        ],
        identity=[cell.key for cell in wanted],
    )
    return columns


def read_data(config: EvaluateSentencesConfig) -> list[SentenceTask | Judgements]:
    """Read all the data to evaluate on.

    Raises:
        FileNotFoundError, ValueError: naming the field and the file.
        TooManyProblemsError: naming the data, the number of unreadable lines and the first problems.
    """
    names = config.present_tasks
    try:
        found: list[SentenceTask | Judgements] = [read_task(config.data, name) for name in names]
    except (OSError, ValueError) as error:
        raise type(error)(f"data: {error}") from error
    try:
        found += [read_judgements(file, name) for name, file in named_values("similarity", config.similarity).items()]
    except (OSError, ValueError) as error:
        raise type(error)(f"similarity: {error}") from error
    for one in found:
        if isinstance(one, SentenceTask):
            check_folds(one, config)
        if (lost := sum(one.problems.values())) > config.max_bad_share * one.num_lines:
            raise TooManyProblemsError(
                f"{one.name}: {lost} of {one.num_lines} lines cannot be read, more than max_bad_share = "
                f"{config.max_bad_share:.2%}; the first: {'; '.join(one.examples)}"
            )
    return found


def check_folds(task: SentenceTask, config: EvaluateSentencesConfig) -> None:
    """Check that every class of the task has at least as many sentences as there are folds.

    Raises:
        ValueError: naming the field, the value and the number of sentences.
    """
    name, number = "num_inner_folds", config.num_inner_folds
    smallest = int(np.bincount(task.parts["train" if task.has_split else "all"].labels).min())
    if not task.has_split:
        if config.num_folds > smallest:
            name, number = "num_folds", config.num_folds
        else:
            # the sentences of the class that remain when one fold is held out
            smallest -= -(-smallest // config.num_folds)
    elif "dev" in task.parts:
        return
    if number > smallest:
        raise ValueError(
            f"{name} = {number}: a class of {task.name} has {smallest} sentences to divide; choose fewer folds"
        )


def _compute_all(config: EvaluateSentencesConfig, left: Sequence[Cell]) -> None:
    """Compute every cell in its own Ray task, and write its figures as soon as it is finished."""
    start_ray()
    workers = config.workers
    check_resources(
        num_workers=workers.num_workers, cpus_per_worker=workers.cpus_per_worker, use_gpu=workers.use_gpu, data_cpus=0
    )
    task: Any = ray.remote(_computed).options(
        num_cpus=workers.cpus_per_worker,
        num_gpus=1 if workers.use_gpu else 0,
        runtime_env={"env_vars": CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(max(1, int(workers.cpus_per_worker)))}},
    )
    waiting, running = list(reversed(left)), dict[Any, Cell]()
    started, num_done = time.monotonic(), 0
    while waiting or running:
        while waiting and len(running) < workers.num_workers:
            cell = waiting.pop()
            running[task.remote(cell, config.batch_size, workers)] = cell
        (reference, *_), _ = ray.wait(list(running))
        cell = running.pop(reference)
        try:
            figures, seconds = ray.get(reference)
        except RayError as error:
            reason = str(getattr(error, "cause", None) or error).strip()
            raise EvaluationFailedError(f"{cell.title}: {reason}") from error
        write_json(cell.file(config.run.directory), figures)
        num_done += 1
        rest = (time.monotonic() - started) / num_done * (len(left) - num_done)
        print(
            f"{num_done:>{len(str(len(left)))}}/{len(left)}  {cell.title}  {seconds:.1f} s  {clock(rest)} left",
            flush=True,
        )


def _computed(cell: Cell, batch_size: int, workers: EvaluationWorkersSection) -> tuple[dict[str, float], float]:
    torch.set_num_threads(max(1, int(workers.cpus_per_worker)))
    started = time.monotonic()
    return compute(cell, batch_size=batch_size, use_gpu=workers.use_gpu), time.monotonic() - started
