"""The job: archives → parts → a pool of models → tables; it writes only what the output still lacks.

The tables depend neither on the number of workers nor on the order in which parts are finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pyarrow as pa
import ray

from jobs.engine.cluster import start_ray
from jobs.scoring.config import LanguageModelPool
from jobs.scoring.stages import ScoringFailedError, Stages, run_stages
from jobs.scoring.temperatures.tables import SUMMARY_FILE, existing_parts, part_file
from jobs.scoring.temperatures.texts.parts import Part, ReadArchive, read_parts, token_arrays
from jobs.scoring.temperatures.texts.predictor import Predictor
from jobs.scoring.temperatures.texts.settings import PredictionSettings, record_digest
from jobs.scoring.temperatures.texts.totals import Totals
from jobs.scoring.temperatures.texts.write import document_table, read_totals, write_table
from pipelines.archives import Archive
from pipelines.problems import check_problems
from pipelines.storage import relative, resolve, write_json


class _PartPredictor:
    """Adds the predictions to parts, in a worker."""

    def __init__(self, settings: PredictionSettings, devices: Mapping[str, Any]) -> None:
        self._predictor = Predictor(settings, **devices)
        self._with_entropy = settings.with_entropy

    def __call__(self, part: Part) -> Part:
        predictions = self._predictor.predict(token_arrays(part.table["token_ids"]))
        floats = pa.list_(pa.float32())
        table = part.table.append_column("tau", pa.array([prediction.tau for prediction in predictions], floats))
        if self._with_entropy:
            table = table.append_column("entropy", pa.array([prediction.entropy for prediction in predictions], floats))
        return Part(part.archive, part.number, table)


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
    done = existing_parts(output)
    missing = [number for number in range(len(archives)) if not _is_complete(output, number, done)]
    if len(missing) < len(archives) or done:
        say(
            f"{output} holds {len(done)} parts; {len(archives) - len(missing)} of {len(archives)} archives are complete"
        )
    root = resolve(settings.source)[1]
    names = [relative(archive.path, root) for archive in archives]
    started = time.monotonic()
    num_tokens = 0

    def read(number: int) -> Iterator[Part]:
        return read_parts(settings, archives[number], number, output, done=done)

    def write(part: Part) -> tuple[int, Totals]:
        table, totals = document_table(part.table, names[part.archive], settings)
        write_table(table, totals, output, part.file)
        return part.number, totals

    def keep(number: int, written: tuple[int, Totals], seconds: float) -> str:
        nonlocal num_tokens
        part, totals = written
        num_tokens += totals.num_tokens
        return _describe_part(part, totals, seconds)

    stages: Stages[int] = Stages(read=read, model=partial(_PartPredictor, settings, workers.devices), write=write)
    failed = run_stages(stages, missing, workers, title=names.__getitem__, keep=keep, say=say)
    if failed:
        raise ScoringFailedError(failed)
    records = [record for number in range(len(archives)) if (record := ReadArchive.load(output, number)) is not None]
    check_problems(settings.source, [record.entry for record in records], max_bad_share, field="max_bad_share")
    summary = _summary(settings, archives, records, _sum_totals(output, records))
    write_json(f"{output}/{SUMMARY_FILE}", summary)
    return summary | {"num_tokens_now": num_tokens, "seconds_now": time.monotonic() - started}


def on_worker(function: Callable[..., Any], workers: LanguageModelPool) -> Callable[..., Any]:
    """Wraps a function to run as a Ray task with a worker's resources, since the driver's machine may have no GPU."""

    def call(*arguments: Any, **options: Any) -> Any:
        start_ray()
        task = ray.remote(num_cpus=workers.cpus_per_worker, num_gpus=workers.num_gpus)(function)
        return ray.get(task.remote(*arguments, **options))

    return call


def _is_complete(output: str, number: int, done: frozenset[str]) -> bool:
    record = ReadArchive.load(output, number)
    return record is not None and all(part_file(number, part) in done for part in range(record.num_parts))


def _describe_part(part: int, totals: Totals, seconds: float) -> str:
    """Returns what the line of progress says of a part: its size, mean τ and speed."""
    mean = f"mean τ {totals.tau / totals.num_tokens:.3f}, " if totals.num_tokens else ""
    return (
        f"part {part}: {totals.num_documents} documents, {totals.num_tokens} tokens, {mean}"
        f"{totals.num_tokens / seconds:,.0f} tokens/s"
    )


def _sum_totals(output: str, read: list[ReadArchive]) -> Totals:
    """Returns the totals of all parts of the archives, which the metadata of the tables hold."""
    return Totals.sum(
        [
            read_totals(output, part_file(number, part))
            for number, archive in enumerate(read)
            for part in range(archive.num_parts)
        ]
    )


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
        "settings_digest": record_digest(record),
        "settings": record,
    }
