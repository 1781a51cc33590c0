"""The actor that prepares the parts of a text while training runs (see `pipelines.text.growing`)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import ray

from pipelines.plan import StreamPlan
from pipelines.problems import check_problems
from pipelines.recorded_tasks import read_records
from pipelines.retries import RETRIES
from pipelines.storage import write_json
from pipelines.text.manifest import ArchiveEntry, archive_from_json
from pipelines.text.part_preparation import PartTask
from pipelines.text.prepare import finish_manifest

# The share of unreadable records is judged once this many records were read, and at the end.
_NUM_RECORDS_TO_JUDGE = 10_000


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
    """Largest share of unreadable records, in [0, 1]."""
    max_bad_share_field: str = "max_bad_share"
    """Name of the setting that `max_bad_share` comes from, for the error message."""


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class PartPreparer:
    """Actor that prepares the parts of a source, a bounded number of them ahead of those that were asked for.

    Args:
        task: the preparation of the parts.
        settings: how to prepare them.
    """

    def __init__(self, task: PartTask, settings: GrowingSettings) -> None:
        self._task, self._settings = task, settings
        self._order = order_parts(settings.seed, len(task.parts))
        self._positions = {part: position for position, part in enumerate(self._order)}
        records = read_records([part.name for part in task.parts], task.directory)
        self._entries: dict[int, ArchiveEntry] = {
            number: archive_from_json(record) for number, record in enumerate(records) if record is not None
        }
        self._running: dict[int, asyncio.Task[None]] = {}
        self._num_wanted = 0
        self._shared_task = ray.put(task)
        # The part that the first epoch begins with is prepared while the workers that will ask for it are being started.
        # It is one part, because CPUs for one preparing task are free beside the workers; more could keep the workers
        # from their place. An error is left to whoever asks for the part.
        self._begun = {part: self._submit(part) for part in self._order[:1] if part not in self._entries}

    async def wait_for(self, part: int) -> list[int]:
        """Return the number of rows of every shard of a part, as soon as it is prepared.

        Raises:
            TooManyProblemsError: if too many of the records that were read so far are unreadable.
            OSError: if the part cannot be read or written. It is tried again when it is asked for again.
        """
        self._num_wanted = max(self._num_wanted, self._positions[part] + 1)
        while part not in self._entries:
            self._start_parts()
            await asyncio.shield(self._running[part])
        self._start_parts()
        self._check()
        return [shard.num_rows for shard in self._entries[part].shards]

    def take_retries(self) -> int:
        """Return what was counted of repeated requests since the last call (`pipelines.retries.Retries.take`)."""
        return RETRIES.take()

    def _start_parts(self) -> None:
        """Start to prepare every part that is wanted, or will be soon, unless this was done."""
        for part in self._order[: self._num_wanted + self._settings.num_parts_ahead]:
            self._start(part)

    def _start(self, part: int) -> None:
        """Start to prepare a part, unless this was done."""
        if part not in self._entries and part not in self._running:
            self._running[part] = asyncio.get_running_loop().create_task(self._prepare(part))

    def _submit(self, part: int) -> Any:
        """Submit the Ray task that prepares a part, and return the reference of its result."""
        settings = self._settings
        options = _run_part.options(num_cpus=settings.num_cpus, resources=settings.resources)
        return options.remote(self._shared_task, part)

    async def _prepare(self, part: int) -> None:
        try:
            record, retries = await (self._begun.pop(part) if part in self._begun else self._submit(part))
            RETRIES.add(retries)
            self._entries[part] = archive_from_json(record)
            if len(self._entries) == len(self._order):
                finish_manifest(self._task, self._list_entries())
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            del self._running[part]

    def _list_entries(self) -> list[ArchiveEntry]:
        return [self._entries[part] for part in sorted(self._entries)]

    def _check(self) -> None:
        """Raise TooManyProblemsError if the share of unreadable records is too large to go on."""
        entries = self._list_entries()
        num_seen = sum(entry.num_documents + sum(entry.problems.values()) for entry in entries)
        if num_seen >= _NUM_RECORDS_TO_JUDGE or len(entries) == len(self._order):
            check_problems(
                self._task.source, entries, self._settings.max_bad_share, field=self._settings.max_bad_share_field
            )


@ray.remote
def _run_part(task: PartTask, part: int) -> tuple[dict[str, Any], int]:
    """Prepare a part and write its record; return it, and what was counted of repeated requests (`Retries.take`)."""
    record = task.run(part)
    write_json(f"{task.directory}/{task.parts[part].name}.json", record)
    return record, RETRIES.take()


def order_parts(seed: int, num_parts: int) -> list[int]:
    """Return the numbers of the parts in the order in which the first epoch visits them."""
    return StreamPlan(shard_sizes=(1,) * num_parts, seed=seed).order_parts(0)
