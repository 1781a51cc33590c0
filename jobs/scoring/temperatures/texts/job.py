"""The Ray Data job: archives → parts → a pool of models → tables; it writes only what the output still lacks.

Three stages run at the same time: reading and tokenising; the model; computing figures and writing. A part passes
through them as one row, so the tables depend neither on the number of workers nor on the order in which parts are
finished.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pyarrow as pa
import ray
import ray.data
from pyarrow.fs import FileSelector, FileType

from jobs.engine.cluster import CPU_ENVIRONMENT, check_resources, start_ray
from jobs.scoring.temperatures.texts.config import PredictionWorkers
from jobs.scoring.temperatures.texts.parts import ReadArchive, from_bytes, part_file, read_parts, to_bytes, token_arrays
from jobs.scoring.temperatures.texts.predictor import Predictor
from jobs.scoring.temperatures.texts.settings import PredictionSettings, record_digest
from jobs.scoring.temperatures.texts.totals import Totals
from jobs.scoring.temperatures.texts.write import document_table, read_totals, write_table
from pipelines.archives import Archive
from pipelines.problems import check_problems
from pipelines.storage import relative, resolve, write_json

SUMMARY_FILE = "_summary.json"
_READ_CPUS = 0.5
_WRITE_CPUS = 0.5


class _Model:
    """A worker of the pool: takes a row with one part, and returns it with the part's predictions added."""

    def __init__(self, settings: PredictionSettings, use_gpu: bool) -> None:
        self._predictor = Predictor(settings, use_gpu=use_gpu)
        self._with_entropy = settings.with_entropy

    def __call__(self, rows: pa.Table) -> pa.Table:
        part = from_bytes(rows["table"][0].as_py())
        started = time.monotonic()
        predictions = self._predictor.predict(token_arrays(part["token_ids"]))
        seconds = time.monotonic() - started
        floats = pa.list_(pa.float32())
        part = part.append_column("tau", pa.array([prediction.tau for prediction in predictions], floats))
        if self._with_entropy:
            part = part.append_column("entropy", pa.array([prediction.entropy for prediction in predictions], floats))
        return rows.set_column(
            rows.schema.get_field_index("table"), "table", pa.array([to_bytes(part)], pa.large_binary())
        ).append_column("seconds", pa.array([seconds]))


def predict_archives(
    settings: PredictionSettings,
    archives: list[Archive],
    output: str,
    workers: PredictionWorkers,
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
        TooManyProblemsError: if too many records were unreadable; the tables of the readable ones are kept.
    """
    done = _existing_tables(output)
    missing = [number for number in range(len(archives)) if not _is_complete(output, number, done)]
    if len(missing) < len(archives) or done:
        say(
            f"{output} holds {len(done)} parts; {len(archives) - len(missing)} of {len(archives)} archives are complete"
        )
    started = time.monotonic()
    num_tokens = 0
    if missing:
        start_ray()
        check_resources(
            num_workers=workers.num_workers,
            cpus_per_worker=workers.cpus_per_worker,
            use_gpu=workers.use_gpu,
            data_cpus=_READ_CPUS + _WRITE_CPUS,
        )
        # Closing the generator stops Ray Data's executor if this loop is left early.
        with contextlib.closing(_finished_parts(settings, archives, missing, done, output, workers)) as rows:
            for row in rows:
                totals = Totals.from_json(json.loads(row["totals"]))
                num_tokens += totals.num_tokens
                say(_line(settings, archives[row["archive"]], row["part"], totals, row["seconds"]))
    reads = [ReadArchive.load(output, number) for number in range(len(archives))]
    read = [record for record in reads if record is not None]
    check_problems(settings.source, [record.entry for record in read], max_bad_share, field="max_bad_share")
    parts = [
        read_totals(output, part_file(number, part))
        for number, record in enumerate(read)
        for part in range(record.num_parts)
    ]
    summary = _summary(settings, archives, read, Totals.sum(parts))
    write_json(f"{output}/{SUMMARY_FILE}", summary)
    seconds = time.monotonic() - started
    return summary | {"num_tokens_now": num_tokens, "seconds_now": seconds}


def on_worker(function: Callable[..., Any], workers: PredictionWorkers) -> Callable[..., Any]:
    """Wraps a function to run as a Ray task with a worker's resources, since the driver's machine may have no GPU."""

    def call(*arguments: Any, **options: Any) -> Any:
        start_ray()
        task = ray.remote(num_cpus=workers.cpus_per_worker, num_gpus=1 if workers.use_gpu else 0)(function)
        return ray.get(task.remote(*arguments, **options))

    return call


def _finished_parts(
    settings: PredictionSettings,
    archives: list[Archive],
    missing: list[int],
    done: frozenset[str],
    output: str,
    workers: PredictionWorkers,
) -> Generator[dict[str, Any], None, None]:
    """Yields a row with archive, part, totals (JSON) and the model's seconds for every part, as it is finished."""
    root = resolve(settings.source)[1]

    def read(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        number = row["archive"]
        return read_parts(settings, archives[number], number, output, done=done)

    def write(row: dict[str, Any]) -> dict[str, Any]:
        source = relative(archives[row["archive"]].path, root)
        table, totals = document_table(from_bytes(row["table"]), source, settings)
        write_table(table, totals, output, row["archive"], row["part"])
        return {**{name: row[name] for name in ("archive", "part", "seconds")}, "totals": json.dumps(totals.to_json())}

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = ray.data.from_items([{"archive": number} for number in missing], override_num_blocks=len(missing))
    rows.context.enable_progress_bars = False
    # Blocks are as small as possible, one part each, so that the next stage need not wait for the whole archive.
    rows.context.target_max_block_size = 1
    yield from (
        rows.flat_map(read, num_cpus=_READ_CPUS)
        .map_batches(
            _Model,
            batch_size=1,
            batch_format="pyarrow",
            fn_constructor_args=(settings, workers.use_gpu),
            compute=ray.data.ActorPoolStrategy(size=workers.num_workers),
            num_cpus=workers.cpus_per_worker,
            num_gpus=1 if workers.use_gpu else None,
            runtime_env={"env_vars": CPU_ENVIRONMENT},
        )
        .map(write, num_cpus=_WRITE_CPUS)
        .iter_rows()
    )


def _existing_tables(output: str) -> frozenset[str]:
    filesystem, path = resolve(output)
    files = filesystem.get_file_info(FileSelector(path))
    return frozenset(
        file.base_name for file in files if file.type == FileType.File and file.base_name.startswith("part-")
    )


def _is_complete(output: str, number: int, done: frozenset[str]) -> bool:
    record = ReadArchive.load(output, number)
    return record is not None and all(part_file(number, part) in done for part in range(record.num_parts))


def _line(settings: PredictionSettings, archive: Archive, part: int, totals: Totals, seconds: float) -> str:
    name = relative(archive.path, resolve(settings.source)[1])
    mean = f"mean τ {totals.tau / totals.num_tokens:.3f}, " if totals.num_tokens else ""
    return (
        f"{name} part {part}: {totals.num_documents} documents, {totals.num_tokens} tokens, {mean}"
        f"{totals.num_tokens / seconds:,.0f} tokens/s"
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
