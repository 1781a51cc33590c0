"""Running an evaluation: workers compute the unfinished cells, finished ones are read, and a table is published."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np

from jobs.engine.fields import named_values
from jobs.engine.tracking import resolve_uri
from jobs.scoring.models import model_labels
from jobs.scoring.results import Column, Results, percent_table, publish_evaluation
from jobs.scoring.sentence_encoders.cells import Cell, CellComputer, SentenceEncoderSpec, cells
from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig
from jobs.scoring.units import UnitStore, Work, map_units
from pipelines.problems import TooManyProblemsError
from pipelines.sentences.senteval import Judgements, SentenceTask, read_judgements, read_task

_TITLES = {
    "accuracy": "accuracy",
    "spearman": "Spearman",
    "pearson": "Pearson",
    "num_sentences": "sentences",
    "num_pairs": "pairs",
    "num_unreadable": "unreadable",
    "share_cut": "cut to the model's tokens",
    "mean_accuracy": "mean accuracy",
}


def evaluate(config: EvaluateSentencesConfig) -> Results:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the figures.

    Raises:
        ValueError, OSError: naming the field and the value, before any work starts.
        TooManyProblemsError: if too large a share of the data is unreadable.
        ScoringFailedError: naming every failed cell, once all others have finished and the results are published.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    data = read_data(config)
    models = [
        SentenceEncoderSpec.read(label, path, config)
        for label, path in zip(model_labels(config.models), config.models, strict=True)
    ]
    all_cells = cells(config, models, data)
    store = UnitStore(f"{config.run.directory}/cells")
    finished = store.names()
    left = [cell for cell in all_cells if cell.file not in finished]
    print(f"{len(all_cells)} cells, {len(all_cells) - len(left)} of them finished before; {config.run.directory}")
    work: Work[Cell] = Work(model=partial(CellComputer, config), title=lambda cell: cell.title, noun="lines")
    failed = map_units(left, work, config.workers, store).failed
    columns = [Column.of_model(model) for model in models]
    for column, model in zip(columns, models, strict=True):
        for cell in all_cells:
            if cell.model == model:
                figures = store.read_json(cell.file) or {}
                column.metrics.update({f"{cell.data.name}/{name}": value for name, value in figures.items()})
        column.metrics.update({f"{data_set.name}/num_unreadable": sum(data_set.problems.values()) for data_set in data})
    return publish_evaluation(
        config,
        uri=uri,
        columns=columns,
        render=sentence_table,
        identity=[cell.key for cell in all_cells],
        failed=failed,
    )


def sentence_table(columns: Sequence[Column]) -> str:
    """Returns the table; its last row is the mean accuracy, unless a column lacks an accuracy that another one has."""
    names = {name for column in columns for name in column.metrics if name.endswith("/accuracy")}
    if names and all(names <= column.metrics.keys() for column in columns):
        columns = [
            dataclasses.replace(column, metrics={**column.metrics, "mean_accuracy": mean_accuracy(column) or 0.0})
            for column in columns
        ]
    return percent_table(columns, _TITLES, hidden_if_zero=("num_unreadable", "share_cut"))


def mean_accuracy(column: Column) -> float | None:
    """Returns the mean accuracy over the tasks, from 0 to 1; None if there are no tasks."""
    accuracies = [value for name, value in column.metrics.items() if name.endswith("/accuracy")]
    return statistics.fmean(accuracies) if accuracies else None


def read_data(config: EvaluateSentencesConfig) -> list[SentenceTask | Judgements]:
    """Read all the data to evaluate on.

    Raises:
        FileNotFoundError, ValueError: naming the field and the file.
        TooManyProblemsError: naming the data, the number of unreadable lines and the first problems.
    """
    names = config.present_tasks
    try:
        data: list[SentenceTask | Judgements] = [read_task(config.data, name) for name in names]
    except (OSError, ValueError) as error:
        raise type(error)(f"data: {error}") from error
    try:
        data += [read_judgements(file, name) for name, file in named_values("similarity", config.similarity).items()]
    except (OSError, ValueError) as error:
        raise type(error)(f"similarity: {error}") from error
    for data_set in data:
        if isinstance(data_set, SentenceTask):
            check_folds(data_set, config)
        if (lost := sum(data_set.problems.values())) > config.max_bad_share * data_set.num_lines:
            raise TooManyProblemsError(
                f"{data_set.name}: {lost} of {data_set.num_lines} lines cannot be read, more than max_bad_share = "
                f"{config.max_bad_share:.2%}; the first: {'; '.join(data_set.examples)}"
            )
    return data


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
