"""Prepare archives of any kind: one task per unit, resumably, with every lost record counted and listed.

A kind of data (`pipelines.text.prepare`, `pipelines.images.prepare`) says which units there are, prepares one of them, and
makes a manifest of the records of all. The name of the prepared directory contains a hash of everything that determines
its content. Every finished unit leaves a record, so that an interrupted preparation continues with the remaining ones.
Where Ray runs, the units are Ray Data tasks, except within :func:`preparing_here`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, TypeVar

from pipelines.problems import Reading, check_problems, list_lost
from pipelines.storage import create_directory, read_json, split_query, write_json
from pipelines.store_errors import RETRIES, RetryLog

_NUM_THREADS = 16
_NUM_CHARACTERS_OF_NAME = 100
_IS_HERE: ContextVar[bool] = ContextVar("is_here", default=False)


class PreparedManifest(Protocol):
    """Description of a prepared data set: what was read, the files that list the lost records, and how it is written."""

    @property
    def readings(self) -> Sequence[Reading]: ...
    @property
    def lost_files(self) -> Sequence[str]: ...
    def save(self) -> None: ...


Prepared = TypeVar("Prepared", bound=PreparedManifest)


def prepare(
    load: Callable[[], Prepared],
    make_task: Callable[[], Any],
    *,
    source: str,
    directory: str,
    max_bad_share: float,
    noun: str,
    max_bad_share_field: str = "max_bad_share",
    losses: str = "",
    resources: Mapping[str, float] | None = None,
) -> Prepared:
    """Load the manifest of a prepared directory, or prepare what it lacks.

    Args:
        load: loads the manifest, and raises FileNotFoundError if the data are not (completely) prepared.
        make_task: returns the preparation of the units, which is sent to the tasks: their distinct names in stored order
            (`unit_names`), `run(number)`, which prepares one and returns its record, a JSON object, and `finish(records)`,
            which returns the manifest, given the records of all units in order.
        source: path or URI of what is prepared, for messages, which call a record `noun`.
        directory: path or URI of the prepared directory, which is created.
        max_bad_share: largest share of records that may be unreadable, in [0, 1]; messages call it `max_bad_share_field`.
        losses: path or URI of a file to list every lost record in, also if there are too many; empty: none.
        resources: custom Ray resources that every task takes, by which the tasks are kept to certain nodes.

    Raises:
        TooManyProblemsError: if too many records are unreadable; the message names the share, the kinds of problems and the
            archives.
    """
    if losses:
        list_lost(directory, (), losses)  # so that a place that cannot be written to is refused beforehand
    try:
        manifest = load()
    except FileNotFoundError:
        create_directory(directory)
        task = make_task()
        manifest = task.finish(run_tasks(task.run, task.unit_names, directory, resources=resources))
        manifest.save()
    if losses:
        list_lost(directory, manifest.lost_files, losses)
    check_problems(source, manifest.readings, max_bad_share, field=max_bad_share_field, noun=noun)
    return manifest


def directory_name(source: str, label: str, content: object) -> str:
    """Return the name of a prepared directory: the source's name as far as it can be part of one, a label and a hash.

    The hash is that of a JSON value which has all that determines what is prepared.
    """
    name = split_query(source)[0].rstrip("/").rsplit("/", 1)[-1].split(".")[0]
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=6).hexdigest()
    return f"{re.sub(r'[{}*,]+', '_', name)[:_NUM_CHARACTERS_OF_NAME]}-{label}-{digest}"


# ---- tasks -----------------------------------------------------------------------------------------------------------


@contextmanager
def preparing_here() -> Iterator[None]:
    """Prepare in this process what is prepared inside the block: it may hold the CPUs for which tasks of Ray would wait."""
    token = _IS_HERE.set(True)
    try:
        yield
    finally:
        _IS_HERE.reset(token)


def run_tasks(
    run: Callable[[int], dict[str, Any]],
    names: Sequence[str],
    directory: str,
    *,
    resources: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Call `run(number)` for every unit that has no record in `directory` yet; return the records of all units in order.

    `run` returns a JSON object, which is saved as the unit's record `<name>.json` after it has returned, so that a record
    exists only if everything else was written. Requests to object stores that had to be repeated are shown and counted.
    """
    done = read_records(names, directory)
    rows = [{"number": number} for number, record in enumerate(done) if record is None]

    def run_row(row: dict[str, Any]) -> dict[str, Any]:
        record = run(row["number"])
        write_json(f"{directory}/{names[row['number']]}.json", record)
        return {"number": row["number"], "record": json.dumps(record), "retries": RETRIES.take()}

    if rows:
        retry_log = RetryLog(partial(print, file=sys.stderr, flush=True))
        ray = sys.modules.get("ray")  # what reads prepared data, or prepares them alone, need not import it
        in_tasks = not _IS_HERE.get() and ray is not None and ray.is_initialized()
        for row in _map_in_tasks(run_row, rows, resources or {}) if in_tasks else map(run_row, rows):
            number = int(row["retries"])
            RETRIES.add(number)
            retry_log.add(number)
            done[row["number"]] = json.loads(row["record"])
    return [record or {} for record in done]


def _map_in_tasks(
    run: Callable[[dict[str, Any]], dict[str, Any]], rows: Sequence[dict[str, Any]], resources: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.from_items(list(rows), override_num_blocks=len(rows)).map(run, resources=dict(resources))
    yield from dataset.iter_rows()


def read_records(names: Sequence[str], directory: str) -> list[dict[str, Any] | None]:
    """Return the record of every unit, or None where there is none yet."""
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="records") as pool:
        return list(pool.map(read_json, [f"{directory}/{name}.json" for name in names]))
