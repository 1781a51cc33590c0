"""Text that is prepared while training runs: its parts become known in the order in which the first epoch visits them.

One actor for the whole run (`PartPreparer`) prepares the parts with Ray tasks, ahead of the training by a bounded number.
The workers ask it for a part when they reach it, and read the shards themselves. Parts are those of `pipelines.text.prepare`,
so the batches are the same as with data that were prepared ahead, and a run can be continued either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import ray
from ray.actor import ActorHandle

from pipelines.archives import describe_not_read
from pipelines.plan import StreamPlan
from pipelines.prepare import read_records
from pipelines.problems import TooManyProblemsError, check_problems
from pipelines.storage import read_json, write_json
from pipelines.store_errors import RETRIES
from pipelines.text.manifest import (
    ArchiveEntry,
    Layout,
    Manifest,
    ShardEntry,
    archive_from_json,
    archives_digest,
    make_row_keys,
)
from pipelines.text.prepare import PartTask, PrepareConfig, locate_text

# A part's shards are numbered from the part's number times this, because the number of the shards of other parts is
# not known.
_MAX_SHARDS_PER_PART = 2**20
# The share of unreadable records is judged once this many records were read, and at the end.
_NUM_RECORDS_TO_JUDGE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingManifest:
    """Prepared data of which parts are still missing; for reading, it takes the place of a `Manifest`."""

    directory: str
    layout: Layout
    part_names: Sequence[str]
    """Name of every part, in stored order."""
    preparer: ActorHandle
    """The `PartPreparer` of the run."""
    digest: str
    """Hash of what the data are prepared from (`archives_digest`); the hash of the rows is not known yet."""
    not_read: list[str]
    """Names of the files of the source that are not read."""
    check_num_rows: Callable[[int], None] | None = None
    """Function that refuses a number of all rows by an error; it is called once the number is known."""

    def describe(self) -> str:
        """Describe in one line, for a human reader, that the data are being prepared."""
        parts = f"{len(self.part_names)} parts are prepared while training runs, in {self.directory}"
        return parts + describe_not_read(self.not_read)

    def plan(self, *, seed: int, window_size: int) -> GrowingPlan:
        """Return the order of the items, which is that of the complete data."""
        identity = {"archives": self.digest}
        return GrowingPlan(shard_sizes=(), seed=seed, window_size=window_size, identity=identity, parts=self)

    @property
    def num_rows(self) -> None:
        """Number of rows: None, because it is not known yet."""
        return None

    @property
    def problems(self) -> Counter[str]:
        """Number of lost records by kind of problem, over the parts that are prepared."""
        records = read_records(self.part_names, self.directory)
        return sum((Counter(record["problems"]) for record in records if record is not None), Counter())

    def latest(self) -> Manifest | GrowingManifest:
        """Return the manifest of the complete data if all parts are there by now, otherwise this."""
        try:
            return Manifest.load(self.directory)
        except FileNotFoundError:
            return self

    def shard(self, number: int) -> ShardEntry:
        """Return the entry of a shard, which is read from the record of its part."""
        return self._part_of(number)[number % _MAX_SHARDS_PER_PART]

    def _part_of(self, shard: int) -> list[ShardEntry]:
        """Return the entries of all shards of the part of a shard."""
        return _read_shards(f"{self.directory}/{self.part_names[shard // _MAX_SHARDS_PER_PART]}.json")

    def row_keys(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the keys of n rows of prepared parts, which are those of the complete data (see `Manifest.row_keys`)."""
        before = {
            shard: sum(entry.num_rows for entry in self._part_of(shard)[: shard % _MAX_SHARDS_PER_PART])
            for shard in set(shards.tolist())
        }
        first_rows = np.array([before[shard] for shard in shards.tolist()], dtype=np.int64)
        return make_row_keys(shards // _MAX_SHARDS_PER_PART, first_rows + rows)


@cache
def _read_shards(record: str) -> list[ShardEntry]:
    """Return the entries of the shards of a part, which does not change once its record exists."""
    content = read_json(record)
    assert content is not None
    return archive_from_json(content).shards


@dataclass(frozen=True, kw_only=True)
class GrowingPlan(StreamPlan):
    """Order of items of which parts are still being prepared: that of the complete data, but with other numbers of shards."""

    is_growing: ClassVar[bool] = True
    parts: GrowingManifest
    known: dict[int, list[int]] = field(default_factory=dict, compare=False, repr=False)
    """Number of rows of the shards of each part that was asked for."""

    def __post_init__(self) -> None:
        """Check nothing: that there are no items is only known when all parts are there."""

    @property
    def order_version(self) -> int:
        """Version of the rule that makes the order: that of data in parts."""
        return 2

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return len(self.parts.part_names)

    @property
    def num_items_per_epoch(self) -> int | None:
        """Number of items in one epoch; None until all parts were asked for. It may be refused (`check_num_rows`)."""
        if len(self.known) < self.num_parts:
            return None
        size = sum(map(sum, self.known.values()))
        if self.parts.check_num_rows is not None:
            self.parts.check_num_rows(size)
        if not size:
            raise TooManyProblemsError(f"{self.parts.directory} holds no items: the documents are too few or too short")
        return size

    def part(self, number: int) -> Sequence[tuple[int, int]]:
        """Return the number and the size of each shard of a part, as soon as it is prepared (`PartPreparer.wait_for`)."""
        if number not in self.known:
            try:
                self.known[number] = ray.get(self.parts.preparer.wait_for.remote(number))
                RETRIES.add(ray.get(self.parts.preparer.take_retries.remote()))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
        return list(enumerate(self.known[number], start=number * _MAX_SHARDS_PER_PART))


def load_or_grow(
    config: PrepareConfig,
    layout: Layout,
    root: str,
    settings: GrowingSettings,
    check_num_rows: Callable[[int], None] | None = None,
) -> Manifest | GrowingManifest:
    """Return the manifest of a text that is completely prepared; otherwise start to prepare it, and do not wait.

    Ray must be running. The preparing actor ends with the job that calls this. `check_num_rows` refuses a number of all
    rows by an error: here if all parts are there already, otherwise in each process that has asked for all of them.
    """
    task, not_read = locate_text(config, layout, root)
    try:
        manifest = Manifest.load(task.directory)
    except FileNotFoundError:
        task = task.divide()
        preparer = PartPreparer.remote(task, settings)  # type: ignore[attr-defined]  # Ray's decorator adds it
        return GrowingManifest(
            directory=task.directory,
            layout=task.layout,
            part_names=tuple(part.name for part in task.parts),
            preparer=preparer,
            digest=archives_digest(task.layout, task.archives),
            not_read=not_read,
            check_num_rows=check_num_rows,
        )
    check_problems(task.source, manifest.archives, settings.max_bad_share, field=settings.max_bad_share_field)
    if check_num_rows is not None:
        check_num_rows(manifest.num_rows)
    return replace(manifest, not_read=not_read)


# ---- the actor -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingSettings:
    """How parts are prepared while training runs."""

    seed: int
    """Seed of the order in which the first epoch visits the parts."""
    num_parts_ahead: int = 16
    """Number of parts that may be prepared before training asks for them, which bounds the disk space in advance."""
    num_cpus: float = 1.0
    """Number of logical CPUs that Ray reserves for each preparing task."""
    resources: dict[str, float] = field(default_factory=dict)
    """Custom Ray resources that a preparing task takes, by which the tasks are kept to certain nodes."""
    max_bad_share: float = 0.01
    max_bad_share_field: str = "max_bad_share"


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class PartPreparer:
    """Actor that prepares the parts of a source, a bounded number of them ahead of those that were asked for."""

    def __init__(self, task: PartTask, settings: GrowingSettings) -> None:
        self._task, self._settings = task, settings
        self._order = StreamPlan(shard_sizes=(1,) * len(task.parts), seed=settings.seed).order_parts(0)
        self._positions = {part: position for position, part in enumerate(self._order)}
        records = read_records(task.unit_names, task.directory)
        self._entries: dict[int, ArchiveEntry] = {
            number: archive_from_json(record) for number, record in enumerate(records) if record is not None
        }
        self._num_wanted = 0
        self._finished: Manifest | None = None
        self._shared_task = ray.put(task)
        # The part that the first epoch begins with is prepared while the workers that will ask for it are being started.
        # It is one part, because CPUs for one preparing task are free beside the workers; more could keep the workers
        # from their place. An error is left to whoever asks for the part.
        self._running = {part: self._submit(part) for part in self._order[:1] if part not in self._entries}

    async def wait_for(self, part: int) -> list[int]:
        """Return the number of rows of every shard of a part, as soon as it is prepared.

        Raises:
            TooManyProblemsError: if too many of the records that were read so far are unreadable.
            OSError: if the part cannot be read or written. As after a crash, it is tried again when it is asked for again.
        """
        self._num_wanted = max(self._num_wanted, self._positions[part] + 1)
        for number in self._order[: self._num_wanted + self._settings.num_parts_ahead]:
            if number not in self._entries and number not in self._running:
                self._running[number] = self._submit(number)
        if part not in self._entries:
            running = self._running[part]
            try:
                record, retries = await running
            except ray.exceptions.RayError as error:
                if self._running.get(part) is running:  # Others may have waited for it, too, and begun it anew.
                    del self._running[part]
                raise (error.cause if isinstance(error, ray.exceptions.RayTaskError) else error) from None
            if part not in self._entries:  # Others may have waited for it, too.
                RETRIES.add(retries)
                self._entries[part] = archive_from_json(record)
                del self._running[part]
        self._check()
        return [shard.num_rows for shard in self._entries[part].shards]

    def take_retries(self) -> int:
        """Return what was counted of repeated requests since the last call (`pipelines.store_errors.Retries.take`)."""
        return RETRIES.take()

    def _submit(self, part: int) -> Any:
        settings = self._settings
        options = _run_part.options(num_cpus=settings.num_cpus, resources=settings.resources)
        return options.remote(self._shared_task, part)

    def _check(self) -> None:
        """Write the manifest once all parts are there; raise TooManyProblemsError for too large a share of lost records."""
        entries = [self._entries[part] for part in sorted(self._entries)]
        is_whole = len(entries) == len(self._order)
        if is_whole and self._finished is None:
            self._finished = self._task.finish([asdict(entry) for entry in entries])
            self._finished.save()
        if self._finished:
            entries = self._finished.archives
        num_seen = sum(entry.num_documents + sum(entry.problems.values()) for entry in entries)
        if is_whole or num_seen >= _NUM_RECORDS_TO_JUDGE:
            check_problems(
                self._task.source, entries, self._settings.max_bad_share, field=self._settings.max_bad_share_field
            )


@ray.remote
def _run_part(task: PartTask, part: int) -> tuple[dict[str, Any], int]:
    """Prepare a part and write its record; return it, and what was counted of repeated requests (`Retries.take`)."""
    record = task.run(part)
    write_json(f"{task.directory}/{task.parts[part].name}.json", record)
    return record, RETRIES.take()
