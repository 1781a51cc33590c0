"""Temperatures of texts: archives → parts → a pool of models → tables, and the first documents for a page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from jobs.engine.cluster import start_ray
from jobs.scoring.config import LanguageModelPool
from jobs.scoring.temperatures.config import SUMMARY_FILE
from jobs.scoring.temperatures.tables import Totals, document_table, encode_table, read_totals
from jobs.scoring.temperatures.texts import PredictionSettings, Predictor
from jobs.scoring.text_parts import Part, ReadArchive, map_archives, part_files, token_arrays, tokenise
from jobs.scoring.units import Finished, settings_digest
from jobs.tasks.language_model.report import ColouredText
from pipelines.archives import Archive
from pipelines.storage import write_json
from pipelines.text.reading import Document, readable_documents
from pipelines.text.tokenization import load_tokenizer, token_pieces


class _PartPredictor:
    """Adds the predictions to parts, in a worker."""

    def __init__(self, settings: PredictionSettings, devices: Mapping[str, Any]) -> None:
        self._predictor = Predictor(settings, **devices)
        self._settings = settings

    def __call__(self, part: Part) -> Finished:
        predictions = self._predictor.predict(token_arrays(part.table["token_ids"]))
        floats = pa.list_(pa.float32())
        table = part.table.append_column("tau", pa.array([prediction.tau for prediction in predictions], floats))
        if self._settings.with_entropy:
            table = table.append_column("entropy", pa.array([prediction.entropy for prediction in predictions], floats))
        documents, totals = document_table(table, part.source, self._settings)
        return Finished(files={part.file: encode_table(documents, totals)}, num_cases=totals.num_tokens)


def predict_archives(
    settings: PredictionSettings,
    archives: list[Archive],
    output: str,
    workers: LanguageModelPool,
    *,
    max_bad_share: float,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write the missing parts in `output` and the summary, and return the summary; Ray is started if needed.

    Args:
        settings: the checked settings.
        archives: the archives to read.
        output: directory or URI of the tables.
        workers: number and resources of the worker processes.
        max_bad_share: largest share of records that may be unreadable.
        say: called with one line of text for every finished part.

    Raises:
        ValueError: if the cluster can never provide the workers.
        ScoringFailedError: naming every archive that failed; the parts that were finished are kept.
        TooManyProblemsError: if too many records were unreadable; the tables of the readable ones are kept.
    """
    started = time.monotonic()
    records, outcome = map_archives(
        settings,
        archives,
        output,
        workers,
        partial(_PartPredictor, settings, workers.devices),
        max_bad_share=max_bad_share,
        say=say,
    )
    totals = Totals.sum([read_totals(output, file) for file in part_files(records)])
    summary = _summary(settings, archives, records, totals)
    write_json(f"{output}/{SUMMARY_FILE}", summary)
    return summary | {"num_tokens_now": outcome.num_cases, "seconds_now": time.monotonic() - started}


def on_worker(function: Callable[..., Any], workers: LanguageModelPool) -> Callable[..., Any]:
    """Wraps a function to run as a Ray task with a worker's resources, since the driver's machine may have no GPU."""

    def call(*arguments: Any, **options: Any) -> Any:
        start_ray()
        task = ray.remote(num_cpus=workers.cpus_per_worker, num_gpus=workers.num_gpus)(function)
        return ray.get(task.remote(*arguments, **options))

    return call


def _summary(
    settings: PredictionSettings, archives: list[Archive], read: list[ReadArchive], totals: Totals
) -> dict[str, Any]:
    """Returns the content of `_summary.json`: totals, figures of τ over all tokens, problems by kind, and settings."""
    record = settings.record(archives)
    problems: dict[str, int] = {}
    for item in read:
        for kind, count in item.entry.problems.items():
            problems[kind] = problems.get(kind, 0) + count
    return {
        "num_archives": len(archives),
        "num_parts": sum(item.num_parts for item in read),
        "num_documents": totals.num_documents,
        "num_tokens": totals.num_tokens,
        **totals.figures((settings.tau_min, settings.tau_max)),
        "problems": problems,
        "examples": [example for item in read for example in item.entry.examples][:5],
        "settings_digest": settings_digest(record),
        "settings": record,
    }


def first_documents(
    settings: PredictionSettings, archives: list[Archive], num_tokens: int, **devices: Any
) -> dict[str, ColouredText]:
    """Returns key → (tokens, τ, entropy) for the first documents.

    The last document is cut so that there are at most `num_tokens` tokens in all. `devices` are options of `Predictor`.

    Raises:
        ValueError: if there is no readable document, with the first problems.
    """
    tokenizer = load_tokenizer(settings.model)
    problems: Counter[str] = Counter()
    examples: list[str] = []

    def readable() -> Iterator[Document]:
        for archive in archives:
            yield from readable_documents(settings.source, archive, settings.text_field, problems, examples)

    keys: list[str] = []
    documents: list[np.ndarray] = []
    num_left = num_tokens
    for document in readable():
        (ids,) = token_arrays(tokenise([document], tokenizer)["token_ids"])
        if len(ids):
            keys.append(document.key)
            documents.append(ids[:num_left])
            num_left -= len(documents[-1])
        if num_left == 0:
            break
    if not documents:
        raise ValueError(f"{settings.source} holds no readable text: {'; '.join(examples)}")
    predictions = Predictor(replace(settings, with_entropy=True), **devices).predict(documents)
    return {
        key: (token_pieces(tokenizer, ids.tolist()), prediction.tau.tolist(), prediction.entropy.tolist())
        for key, ids, prediction in zip(keys, documents, predictions, strict=True)
        if prediction.entropy is not None
    }
