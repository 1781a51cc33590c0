"""Reads labelled sentences, draws a subset of them, and divides them into folds."""

from __future__ import annotations

import numpy as np
from sklearn.model_selection import StratifiedKFold
from sklearn.utils import resample

from jobs.engine.task import Task
from jobs.tasks.classifier.config import ClassifierConfig, LabelledSection
from pipelines.problems import TooManyProblemsError
from pipelines.sentences.senteval import Examples, LabelledSource, SentenceTask, read_labelled, read_task
from pipelines.text.tokenization import load_tokenizer


def read_data(data: LabelledSection, name: str) -> tuple[SentenceTask, Examples]:
    """Read a task and return it with those of its sentences that are to be divided into folds.

    Args:
        data: the data section of the configuration.
        name: name of a SentEval task; ignored if the data are in `data.file`.

    Raises:
        ValueError, FileNotFoundError: if the data cannot be read; the message names the field, the file and the reason.
        TooManyProblemsError: if too many lines are unreadable.
    """
    field = "data.file" if data.file else "data.directory"
    try:
        task = read_labelled(data.file, data.classes) if data.file else read_task(data.directory, name)
    except (ValueError, OSError) as error:
        raise type(error)(f"{field}: {error}") from error
    if (lost := sum(task.problems.values())) > data.max_bad_share * task.num_lines:
        raise TooManyProblemsError(
            f"{task.name}: {lost} of {task.num_lines} lines cannot be read, more than data.max_bad_share = "
            f"{data.max_bad_share:.2%}; the first: {'; '.join(task.examples)}"
        )
    whole = task.parts["train" if task.has_split else "all"]
    if not data.num_examples:
        return task, whole
    if data.num_examples > len(whole):
        raise ValueError(
            f"data.num_examples = {data.num_examples} is more than the {len(whole)} sentences of {task.name}"
        )
    rows = np.arange(len(whole))
    drawn = resample(rows, replace=False, n_samples=data.num_examples, stratify=whole.labels, random_state=data.seed)
    return task, _rows(whole, np.sort(drawn))


def check_folds(task: SentenceTask, examples: Examples, num_folds: int) -> None:
    """Check that every class has at least as many sentences as there are folds.

    Raises:
        ValueError: if the smallest class has fewer; the message names it.
    """
    counts = np.bincount(examples.labels, minlength=len(task.class_names))
    smallest = int(counts.argmin())
    if counts[smallest] < num_folds:
        count = counts[smallest]
        what = f"class {task.class_names[smallest]!r} of {task.name} has {count} of the {len(examples)} sentences"
        if count < 2:
            raise ValueError(
                f"{what}, too few to be trained on and held out: choose a larger data.num_examples, or fewer classes"
            )
        raise ValueError(f"grid.num_folds = {num_folds}: {what}; choose at most {count}")


def read_fold(config: ClassifierConfig) -> tuple[SentenceTask, LabelledSource, LabelledSource]:
    """Return the task, and the tokenised training and held-out sentences of a cell.

    Raises:
        ValueError: if the tokenizer cannot be loaded or has no padding token. For other errors see :func:`read_data`.
    """
    task, examples = read_data(config.data, config.fold.task)
    check_folds(task, examples, config.fold.num_folds)
    try:
        tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    except ValueError as error:
        raise ValueError(f"data.{error}") from error
    if tokenizer.pad_token_id is None:
        raise ValueError(f"data.tokenizer = {config.tokenizer!r} has no padding token (pad_token)")
    source = LabelledSource.of(examples, tokenizer, num_tokens=config.data.num_tokens)
    inside, outside = folds(examples.labels, config.fold.num_folds, config.run.seed)[config.fold.fold]
    return task, source[inside], source[outside]


def folds(labels: np.ndarray, num_folds: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, for every fold, the rows to train on and the rows that are held out, stratified by class."""
    splitter = StratifiedKFold(num_folds, shuffle=True, random_state=seed)
    return list(splitter.split(np.zeros(len(labels)), labels))


def _rows(examples: Examples, rows: np.ndarray) -> Examples:
    def chosen(texts: list[str]) -> list[str]:
        return [texts[row] for row in rows]

    second = None if examples.second is None else chosen(examples.second)
    return Examples(chosen(examples.first), second, examples.labels[rows])


def create_task(config: ClassifierConfig, rank: int, world_size: int) -> Task:
    """Create the task on a worker."""
    from jobs.tasks.classifier.task import ClassifierTask

    return ClassifierTask(config.with_num_workers(world_size), rank, world_size)
