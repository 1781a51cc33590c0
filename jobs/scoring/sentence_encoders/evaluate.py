"""Running an evaluation of sentence encoders: workers compute the unfinished cells, and a table is published.

A cell is one model on one task; finished cells are stored, so that an evaluation can continue.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from jobs.engine.export import model_digest
from jobs.engine.fields import absolute_path, named_values
from jobs.engine.tracking import resolve_uri
from jobs.scoring.models import LoadedModel, ModelSpec, model_labels
from jobs.scoring.results import Column, Results, percent_table, publish_evaluation
from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig
from jobs.scoring.sentence_encoders.transfer import Labelled, pair_features, similarity_figures, transfer_accuracy
from jobs.scoring.units import Finished, UnitStore, Work, map_units
from pipelines.local_copy import check_source, local_copy
from pipelines.problems import TooManyProblemsError
from pipelines.sentences.senteval import Examples, Judgements, SentenceTask, read_judgements, read_task
from pipelines.text.tokenization import load_tokenizer
from tempnet.models.sentence_encoder import SentenceEncoder, num_positions, saved_num_tokens

# Increase this whenever the same input would give other figures.
_VERSION = 2
_MOST_TOKENS = 512
_DTYPES = {"fp32": None, "bf16": torch.bfloat16}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceEncoderSpec(ModelSpec):
    """Description of a sentence encoder."""

    num_tokens: int
    """Maximum number of tokens per sentence; longer sentences are cut."""

    @classmethod
    def read(cls, label: str, path: str, config: EvaluateSentencesConfig) -> SentenceEncoderSpec:
        """Returns the description of an encoder, which is loaded once to check that it can be.

        Raises:
            ValueError: naming the path, if there is no encoder, if it has no tokenizer, or if it has fewer positions
                than `num_tokens`.
        """
        try:
            check_source(place := local_copy(path))
            encoder = SentenceEncoder.from_pretrained(place).encoder
            load_tokenizer(path, needs_eos=False)
        except ValueError as error:
            raise ValueError(f"models: {error}") from error
        most = num_positions(encoder.config) or _MOST_TOKENS
        if config.num_tokens > most:
            raise ValueError(f"num_tokens = {config.num_tokens} is more than the {most} positions of {path!r}")
        return cls(
            label=label,
            path=absolute_path(path),
            digest=model_digest(path),
            num_tokens=config.num_tokens or saved_num_tokens(place) or min(most, _MOST_TOKENS),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model on one task or one set of similarity judgements."""

    model: SentenceEncoderSpec
    data: SentenceTask | Judgements
    options: Mapping[str, Any]
    """All other settings that decide the figures."""

    @property
    def title(self) -> str:
        """Name of the cell in messages."""
        return f"{self.model.label} · {self.data.name}"

    @property
    def key(self) -> str:
        """Hash of everything that decides the figures, as 24 hex digits."""
        content = [_VERSION, self.model.digest, self.model.num_tokens, dict(self.options), self.data.digest]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=12).hexdigest()

    @property
    def file(self) -> str:
        """Name of the file that stores the figures."""
        return f"{self.key}.json"


def cells(
    config: EvaluateSentencesConfig, models: Sequence[SentenceEncoderSpec], data: Sequence[SentenceTask | Judgements]
) -> list[Cell]:
    """Returns a cell for every combination of model and data, ordered by model."""
    options = {"precision": config.precision}
    folds = {"num_folds": config.num_folds, "num_inner_folds": config.num_inner_folds, "seed": config.seed}
    return [
        Cell(model=model, data=data_set, options=options | (folds if isinstance(data_set, SentenceTask) else {}))
        for model in models
        for data_set in data
    ]


class CellComputer:
    """Computes the figures of cells in a worker, which holds one model at a time."""

    def __init__(self, config: EvaluateSentencesConfig) -> None:
        self._config = config
        self._encoder = LoadedModel(self._load)

    def __call__(self, cell: Cell) -> Finished:
        """Compute accuracy or correlations, the number of sentences or pairs, and the share of texts that were cut."""
        encoder, tokenizer = self._encoder.get(cell.model), load_tokenizer(cell.model.path, needs_eos=False)
        return Finished(
            files={cell.file: compute(cell, encoder, tokenizer, batch_size=self._config.batch_size)},
            num_cases=cell.data.num_lines if isinstance(cell.data, SentenceTask) else len(cell.data.first),
        )

    def _load(self, spec: SentenceEncoderSpec) -> SentenceEncoder:
        model = SentenceEncoder.from_pretrained(local_copy(spec.path), autocast_dtype=_DTYPES[self._config.precision])
        return model.to("cuda" if self._config.workers.use_gpu else "cpu")


def compute(
    cell: Cell, model: SentenceEncoder, tokenizer: PreTrainedTokenizerFast, *, batch_size: int
) -> dict[str, float]:
    """Returns the figures of a cell, see :class:`CellComputer`."""
    num_texts = num_cut = 0

    def encode(texts: Sequence[str]) -> np.ndarray:
        nonlocal num_texts, num_cut
        num_texts += len(texts)
        num_cut += sum(len(row) > cell.model.num_tokens for row in tokenizer(list(texts), verbose=False)["input_ids"])
        return model.encode(texts, tokenizer, num_tokens=cell.model.num_tokens, batch_size=batch_size).numpy()

    def labelled(examples: Examples) -> Labelled:
        features = encode(examples.first)
        if examples.second is not None:
            features = pair_features(features, encode(examples.second))
        return Labelled(features, examples.labels)

    data = cell.data
    if isinstance(data, Judgements):
        figures = similarity_figures(encode(data.first), encode(data.second), data.scores)
        return figures | {"num_pairs": len(data.first), "share_cut": num_cut / num_texts}
    folds = {name: value for name, value in cell.options.items() if name != "precision"}
    accuracy = transfer_accuracy({name: labelled(part) for name, part in data.parts.items()}, **folds)
    num_sentences = sum(map(len, data.parts.values()))
    return {"accuracy": accuracy, "num_sentences": num_sentences, "share_cut": num_cut / num_texts}


def evaluate(config: EvaluateSentencesConfig) -> Results:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the figures.

    Raises:
        ValueError, OSError: naming the field and the value, before any work starts.
        TooManyProblemsError: if too large a share of the data is unreadable.
        ScoringFailedError: naming every failed cell, once all others have finished and the results are published.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    data = read_data(config)
    labels = model_labels(config.models)
    models = [SentenceEncoderSpec.read(label, path, config) for label, path in zip(labels, config.models, strict=True)]
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
    identity = [cell.key for cell in all_cells]
    return publish_evaluation(config, uri=uri, columns=columns, render=sentence_table, identity=identity, failed=failed)


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
    """Read all the data to evaluate on."""
    field = "data"
    try:
        data: list[SentenceTask | Judgements] = [read_task(config.data, name) for name in config.present_tasks]
        field = "similarity"
        data += [read_judgements(file, name) for name, file in named_values("similarity", config.similarity).items()]
    except (OSError, ValueError) as error:
        raise type(error)(f"{field}: {error}") from error
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
    """Check that every class of the task has at least as many sentences as there are folds."""
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
