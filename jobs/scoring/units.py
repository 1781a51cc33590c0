"""The resumable map of everything that is scored: units of work → a pool of models → files of finished units.

    ray.data.from_items(units).map_batches(read).map_batches(Model, compute=ActorPoolStrategy(…))

* `read` turns a unit into items by decoding or tokenising, in Ray Data's tasks beside the pool. Without it a unit is its
  only item.
* The model is built once by each worker of the pool, and called with one item at a time. The worker writes the files of
  what it has finished (`UnitStore`), so that a job that is started again has less to do. The driver only learns the
  number of cases in them.

An exception is caught where it is raised and costs its unit. A worker that dies, for instance with its machine, is
started again by Ray, and its item is tried again; an item that ends its worker every time costs its unit too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
import torch
from pyarrow.fs import FileSelector, FileType
from ray.util.annotations import RayDeprecationWarning

from jobs.engine import FailedError
from jobs.engine.cluster import check_resources, start_ray
from jobs.engine.config import resolve_directory
from jobs.engine.console import clock
from jobs.engine.fields import differences
from jobs.engine.masking import masked
from jobs.engine.worker import CPU_ENVIRONMENT
from jobs.scoring.config import PoolSection
from pipelines.storage import create_directory, read_bytes, read_json, resolve, split_query, write_bytes, write_json
from pipelines.store_errors import RETRIES, RetryLog
from pipelines.stream import Batch

Unit = TypeVar("Unit")

READ_CPUS = 0.5
SETTINGS_FILE = "_settings.json"
# An item whose worker dies is tried again this many times.
_NUM_RETRIES = 2
# As many failures in a row have one cause, such as a full disk: the other units would fail too.
_MAX_FAILURES_IN_A_ROW = 20
_NUM_DIFFERENCES_SHOWN = 8


class ScoringFailedError(FailedError):
    """Units failed, one per line of the message; all that was finished is kept."""

    def __init__(self, failed: Mapping[str, str], table: str = "") -> None:
        super().__init__("\n".join(f"{title}: {reason}" for title, reason in failed.items()))
        self.table = table
        """The table of all results that could be computed; empty if there is none."""


class NoRewardError(FailedError):
    """No text of a step got a reward: the verifier fails for all of them, and nothing can be learned."""


@dataclass(frozen=True, slots=True)
class UnitStore:
    """Files of finished units in a directory at a path or URI. A file exists only if it is whole.

    The name of a file says what decides its content, by a hash, or the directory is for one group of settings (`claim`).
    """

    directory: str

    def names(self) -> frozenset[str]:
        filesystem, path = resolve(self.directory)
        files = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
        return frozenset(file.base_name for file in files if file.type == FileType.File)

    def missing(
        self, units: Sequence[Unit], files: Callable[[Any], Iterable[str]] = lambda unit: [unit.file]
    ) -> list[Unit]:
        """Returns the units that lack one of their files, and prints how many are finished."""
        names = self.names()
        missing = [unit for unit in units if not names.issuperset(files(unit))]
        print(f"{len(units)} units, {len(units) - len(missing)} of them finished before; {self.directory}")
        return missing

    def write(self, files: Mapping[str, bytes | Mapping[str, Any]]) -> None:
        """Write the files of a finished unit in their order; a mapping becomes JSON."""
        for name, content in files.items():
            if isinstance(content, bytes):
                write_bytes(f"{self.directory}/{name}", content)
            else:
                write_json(f"{self.directory}/{name}", content)

    def read(self, name: str) -> bytes:
        return read_bytes(f"{self.directory}/{name}")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Returns the JSON object in a file, or None if there is no such file."""
        return read_json(f"{self.directory}/{name}")

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Create the directory and write the settings to it, or check that it was begun with the same ones (ValueError)."""
        create_directory(self.directory)
        known = self.read_json(SETTINGS_FILE)
        if known is None:
            self.write({SETTINGS_FILE: settings})
        elif changes := differences(known, dict(settings)):
            more = len(changes) - _NUM_DIFFERENCES_SHOWN
            shown = "; ".join(changes[:_NUM_DIFFERENCES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
            raise ValueError(f"output = {self.directory} was begun with other settings: choose another one. {shown}")


def absolute_output(output: str) -> str:
    """Returns a directory of results, which need not exist, as an absolute path or a URI (ValueError if it would be lost)."""
    return resolve_directory("output", output)


def part_file(archive: int, part: int) -> str:
    """Returns the file name of a part's table; sorted by name, the tables follow the order of the data."""
    return f"part-{archive:05d}-{part:05d}.parquet"


def to_parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


def settings_digest(settings: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def unit_key(content: Any, num_bytes: int = 12) -> str:
    """Returns a hash, in hex digits, of the JSON value that decides what is in the file of a unit or in results."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=num_bytes).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a model made of an item."""

    files: Mapping[str, bytes | Mapping[str, Any]] = field(default_factory=dict)
    """Name → content of what the worker stores, in this order; a mapping becomes JSON."""
    num_cases: int = 0
    """Number of tokens, pairs or other cases, for the line of progress."""
    value: Any = None
    """What is sent to the driver; large values belong into files."""


Model: TypeAlias = Callable[[], Callable[[Any], Finished]]
"""Builds what a worker of the pool calls with every item."""
Reader: TypeAlias = Callable[[Unit], Iterable[Any]]
"""Yields the items of a unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """An item on its way, or the end of a unit that was read; a row of the data set."""

    unit: int  # place of the unit
    item: Any = None  # what the model is called with; None at the end of a unit
    num_items: int | None = None  # number of items of the unit, where it is known
    finished: Finished | None = None  # what the model made of the item, with the names of the files only
    seconds: float = 0.0  # that the model took
    error: str = ""  # reason of a failure in one line
    num_retries: int = 0  # requests to object stores that were repeated since the row before

    def in_batch(self) -> dict[str, np.ndarray]:
        return {"item": np.array([self], dtype=object)}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Adds up the rows of a map, and prints a line for every item."""

    titles: Sequence[str]
    noun: str
    failed: dict[str, str] = field(default_factory=dict)
    """Title → reason for every unit that failed."""
    num_cases: int = 0
    values: dict[int, list[Any]] = field(default_factory=dict)
    """Place of a unit → what the model sent of its items."""
    num_done: int = 0
    """Number of units of which every item is back."""
    num_in_a_row: int = 0
    """Number of failures since the last success."""
    _started: float = field(default_factory=time.monotonic)
    _num_items: dict[int, int] = field(default_factory=dict)  # of every unit that was read to its end
    _num_returned: Counter[int] = field(default_factory=Counter)
    _files: dict[int, set[str]] = field(default_factory=dict)  # that the workers have written of every unit

    def check(self) -> None:
        if self.failed:
            raise ScoringFailedError(self.failed)

    def add(self, row: _Row) -> None:
        """Add a row that has passed the pool."""
        if row.num_items is not None:
            self._num_items[row.unit] = row.num_items
        self._num_returned[row.unit] += row.item is not None
        self.num_done += self._is_done(row.unit)
        total = len(self.titles)
        progress = f"{self.num_done:>{len(str(total))}}/{total}  "
        if row.error:
            self.num_in_a_row += 1
            self._fail(row.unit, row.error, progress)
        elif row.finished is not None:
            self.num_in_a_row = 0
            number = row.finished.num_cases
            self.num_cases += number
            self._files.setdefault(row.unit, set()).update(row.finished.files)
            self.values.setdefault(row.unit, []).append(row.finished.value)
            rate = (
                f"{number:,} {self.noun}, {number / max(row.seconds, 1e-9):,.0f} {self.noun}/s  " if self.noun else ""
            )
            line = f"{progress}{self.titles[row.unit]}  {rate}{row.seconds:.1f} s"
            if self.num_done:
                left = (time.monotonic() - self._started) / self.num_done * (total - self.num_done)
                line += f"  {clock(left)} left"
            print(line)

    def name_lost(self, store: UnitStore | None) -> None:
        """Record units as failed whose rows did not come back, or whose files this machine does not see."""
        for number, title in enumerate(self.titles):
            if not self._is_done(number) and title not in self.failed:
                self._fail(number, f"its worker died {1 + _NUM_RETRIES} times")
        seen = store.names() if store is not None else frozenset()
        for number, files in self._files.items():
            if store is not None and not files <= seen:
                where = f"a worker wrote it where this machine sees nothing: {store.directory} must be shared"
                self._fail(number, where)

    def _is_done(self, unit: int) -> bool:
        return self._num_returned[unit] == self._num_items.get(unit)

    def _fail(self, number: int, reason: str, progress: str = "") -> None:
        self.failed[self.titles[number]] = reason
        print(f"{progress}FAILED  {self.titles[number]}: {reason}")


def map_units(
    units: Sequence[Unit],
    model: Model,
    pool: PoolSection,
    store: UnitStore | None = None,
    *,
    read: Reader[Unit] | None = None,
    title: Callable[[Unit], str] = attrgetter("title"),
    noun: str = "",
) -> Outcome:
    """Do the work on all units, in order, and print a line of progress for every item; Ray is started if needed.

    `title` names a unit in messages, and `noun` what the cases of an item are called; empty: they are not shown. `model` and
    `read` are pickled together with what they hold. A unit that fails does not stop the others, unless many items failed one
    after another. A store must be reachable from all machines.
    """
    outcome = Outcome(titles=[title(unit) for unit in units], noun=noun)
    if not units:
        return outcome
    start_ray()
    check_pool(pool, reads=read is not None)
    if store is not None:
        create_directory(store.directory)
    with closing(run_rows(units, model, read, pool, store)) as rows, closing(RetryLog(print)) as retries:
        for row in rows:
            RETRIES.add(row.num_retries)
            retries.add(RETRIES.take())
            outcome.add(row)
            if outcome.num_in_a_row == _MAX_FAILURES_IN_A_ROW and outcome.num_done < len(units):
                left = len(units) - outcome.num_done
                print(f"{outcome.num_in_a_row} failures one after another: the {left} units left are not tried")
                return outcome
    outcome.name_lost(store)
    return outcome


def check_pool(pool: PoolSection, *, reads: bool) -> None:
    """Check that the cluster is large enough for a pool, and for a reader if units are read beside it (ValueError)."""
    check_resources(
        num_workers=pool.num_workers,
        cpus_per_worker=pool.cpus_per_worker,
        use_gpu=pool.use_gpu,
        gpus_per_worker=pool.num_gpus,
        data_cpus=READ_CPUS if reads else 0.0,
    )


def run_rows(
    units: Sequence[Unit], model: Model, read: Reader[Unit] | None, pool: PoolSection, store: UnitStore | None
) -> Generator[_Row, None, None]:
    """Yield a row for every item as it comes out of the pool, and one for the end of every unit that is read."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.max_errored_blocks = -1  # an item whose worker died every time is missing, which is seen at the end
    context.execution_no_progress_timeout_s = -1  # an item may take long
    context.target_max_block_size = 1  # every item is a block of its own, which goes to the next worker that is free
    num_items = None if read else 1
    read_batch: Any = read_unit  # Ray's types know batches only as unions
    rows = [_Row(unit=number, item=unit, num_items=num_items) for number, unit in enumerate(units)]
    with ray.data.DataContext.current(context), warnings.catch_warnings():
        # Ray 2.64 is to replace `max_task_retries`; without it, an item that always ends its worker is tried for ever.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        dataset: ray.data.Dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
        if read is not None:
            dataset = dataset.map_batches(
                read_batch, fn_args=[read], batch_size=1, batch_format="numpy", num_cpus=READ_CPUS
            )
        dataset = dataset.map_batches(
            Worker,
            fn_constructor_args=[model, store, max(1, int(pool.cpus_per_worker))],
            batch_size=1,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(size=pool.num_workers, max_tasks_in_flight_per_actor=1),
            num_cpus=pool.cpus_per_worker,
            num_gpus=pool.num_gpus or None,
            max_task_retries=_NUM_RETRIES,
            runtime_env={"env_vars": CPU_ENVIRONMENT},
        )
        for batch in dataset.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0):
            yield from batch["item"]


def read_unit(batch: Batch, read: Callable[[Any], Iterable[Any]]) -> Iterator[Batch]:
    """Yield the items of a unit, and at their end a row with their number and, if reading failed, the reason."""
    (row,) = batch["item"]
    num_items, error = 0, ""
    try:
        for item in read(row.item):
            yield _Row(unit=row.unit, item=item, num_retries=RETRIES.take()).in_batch()
            num_items += 1
    except Exception as raised:
        error = describe_error(raised)
    yield _Row(unit=row.unit, num_items=num_items, error=error, num_retries=RETRIES.take()).in_batch()


class Worker:
    def __init__(self, build: Model, store: UnitStore | None, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._build, self._store = build, store
        self._model: Callable[[Any], Finished] | None = None

    def __call__(self, batch: Batch) -> Batch:
        """Return the row of an item with what the model made of it; the row of a unit's end stays as it is."""
        (row,) = batch["item"]
        if row.item is None:
            return batch
        finished, seconds, error = None, 0.0, ""
        try:
            if self._model is None:  # built here, not in __init__, so that an error is that of a unit
                self._model = self._build()
            started = time.monotonic()
            finished = self._model(row.item)
            seconds = time.monotonic() - started
            if self._store is not None:
                self._store.write(finished.files)
            finished = replace(finished, files=dict.fromkeys(finished.files, b""))
        except Exception as raised:
            finished, error = None, describe_error(raised)
        retries = row.num_retries + RETRIES.take()
        return replace(row, item=True, finished=finished, seconds=seconds, error=error, num_retries=retries).in_batch()


def describe_error(error: BaseException) -> str:
    """Returns the type and the text of an exception in one line, without secrets."""
    return masked(" ".join(f"{type(error).__name__}: {error}".split()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    label: str
    path: str
    """Absolute path or URI of its directory, or its hub name."""
    digest: str
    """Digest of the files that decide its outputs; TempNets have digests of their own."""


Spec = TypeVar("Spec", bound=ModelSpec)
Loaded = TypeVar("Loaded")


def holding_one(load: Callable[[Spec], Loaded]) -> Callable[[Spec], Loaded]:
    """Wraps a function that loads models: it keeps the last one, and frees it before it loads another."""
    held: dict[Spec, Loaded] = {}

    def get(spec: Spec) -> Loaded:
        if spec not in held:
            held.clear()
            held[spec] = load(spec)
        return held[spec]

    return get


def model_labels(paths: Sequence[str]) -> list[str]:
    """Returns a short, distinct label for every model path: of `<run>/export` the name of the run, of others the last part.

    It is the whole path if another model has the same; a path that occurs several times has numbered labels.
    """
    paths = [split_query(masked(path))[0] for path in paths]
    parts = [[part for part in path.split("/") if part] for path in paths]
    short = [names[-2] if names[-1] == "export" and len(names) > 1 else names[-1] for names in parts]
    labels = [name if short.count(name) == 1 else path for name, path in zip(short, paths, strict=True)]
    return [
        f"{label} ({labels[: place + 1].count(label)})" if labels.count(label) > 1 else label
        for place, label in enumerate(labels)
    ]
