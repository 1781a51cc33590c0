"""The one scheduler of everything that is scored: read → a pool of models → write, for units of work that fail apart.

* `read` turns a unit into items by decoding or tokenising. It runs in Ray tasks beside the pool.
* `model` is built once by each worker of the pool, and called with one item at a time.
* `write` makes something small of a result, such as a table on disk and its totals. It runs in Ray tasks too.

The three run at the same time. What they hand on goes through Ray's object store, not through the driver, which only
receives what `write` returns. Every unit that was finished is kept, so a job that is started again has less to do.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from jobs.engine.cluster import CPU_ENVIRONMENT, check_resources, start_ray
from jobs.engine.console import clock
from jobs.scoring.config import PoolSection
from jobs.scoring.stage_processes import Worker, read_items, write_result
from pipelines.actor_start import has_started
from pipelines.retries import RETRIES, RetryLog

Unit = TypeVar("Unit")

READ_CPUS = 0.5
# Readers beside one worker: enough decoding for a GPU. Each holds at most `_ITEMS_PER_READER` items in the object store.
_READERS_PER_WORKER = 32
_ITEMS_PER_READER = 2
# A worker that dies, for instance with its machine, is started again, and its item tried again, this many times.
_NUM_RETRIES = 2
# As many failures in a row have one cause, such as a full disk: the other units would fail too.
_MAX_FAILURES_IN_A_ROW = 20
_SECONDS_BETWEEN_LOOKS = 0.05


class ScoringFailedError(RuntimeError):
    """Units failed, one per line of the message; all that was finished is kept."""

    def __init__(self, failed: Mapping[str, str], table: str = "") -> None:
        super().__init__("\n".join(f"{title}: {reason}" for title, reason in failed.items()))
        self.table = table
        """The table of all results that could be computed; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages(Generic[Unit]):
    """The work on a unit. The functions run in other processes, so they are pickled together with what they hold."""

    model: Callable[[], Callable[[Any], Any]]
    """Builds what a worker of the pool calls with every item."""
    read: Callable[[Unit], Iterable[Any]] | None = None
    """Yields the items of a unit; None: the unit is its only item."""
    write: Callable[[Any], Any] | None = None
    """Writes a result and returns what the driver is to know of it; None: the driver receives the result itself."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one item."""

    unit: int
    """Position of the item's unit."""
    value: Any
    """What the last stage returned; None if the item failed."""
    seconds: float
    """Time that the model took."""
    error: str
    """Reason of a failure in one line; empty if there was none."""


def run_stages(
    stages: Stages[Unit],
    units: Sequence[Unit],
    pool: PoolSection,
    *,
    title: Callable[[Unit], str],
    keep: Callable[[Unit, Any, float], str | None],
    say: Callable[[str], None] = print,
) -> dict[str, str]:
    """Take all units through the stages, in order, with a line of progress for every item; Ray is started if needed.

    Requests to object stores that were repeated are reported too, at most once a minute and at the end. A unit that
    fails does not stop the others, unless `_MAX_FAILURES_IN_A_ROW` items failed one after another.

    Args:
        stages: what is done with a unit.
        units: the units that are left to do.
        pool: number and resources of the workers.
        title: names a unit in messages.
        keep: called in the driver with the unit, what the last stage returned and the seconds of the model, for every
            item that is finished. It may return text to add to the line of progress.
        say: called with every line of progress.

    Returns:
        title → reason for every unit that failed.

    Raises:
        ValueError: if the cluster is too small for the pool.
    """
    if not units:
        return {}
    start_ray()
    check_pool(pool, reads=stages.read is not None)
    failed: dict[str, str] = {}
    schedule = _Schedule(stages, units, pool)
    started, num_in_a_row = time.monotonic(), 0
    with closing(schedule.outcomes()) as outcomes, closing(RetryLog(say)) as retries:
        for outcome in outcomes:
            retries.add(RETRIES.take())
            unit, num_done = units[outcome.unit], schedule.num_done
            progress = f"{num_done:>{len(str(len(units)))}}/{len(units)}"
            if outcome.error:
                num_in_a_row += 1
                failed[title(unit)] = outcome.error
                say(f"{progress}  FAILED  {title(unit)}: {outcome.error}")
            else:
                num_in_a_row = 0
                parts = [progress, title(unit), keep(unit, outcome.value, outcome.seconds), f"{outcome.seconds:.1f} s"]
                if num_done:
                    left = (time.monotonic() - started) / num_done * (len(units) - num_done)
                    parts.append(f"{clock(left)} left")
                say("  ".join(filter(None, parts)))
            if num_in_a_row == _MAX_FAILURES_IN_A_ROW and num_done < len(units):
                say(f"{num_in_a_row} failures one after another: the {len(units) - num_done} units left are not tried")
                break
    return failed


def check_pool(pool: PoolSection, *, reads: bool) -> None:
    """Check that the cluster is large enough for a pool, and for a reader if there is a stage that reads.

    Raises:
        ValueError: see :func:`jobs.engine.cluster.check_resources`.
    """
    check_resources(
        num_workers=pool.num_workers,
        cpus_per_worker=pool.cpus_per_worker,
        use_gpu=pool.use_gpu,
        gpus_per_worker=pool.num_gpus,
        data_cpus=READ_CPUS if reads else 0.0,
    )


class _Schedule(Generic[Unit]):
    """Where every unit is: waiting, with a reader, ready for the pool, with a worker, or being written."""

    def __init__(self, stages: Stages[Unit], units: Sequence[Unit], pool: PoolSection) -> None:
        self._units = units
        self._pool = pool
        self._waiting = deque(range(len(units)))
        self._readers: dict[ray.ObjectRefGenerator, int] = {}
        self._ready: deque[tuple[int, Any]] = deque()
        self._running: dict[ray.ObjectRef, tuple[Any, int, ray.ObjectRef]] = {}
        self._writing: dict[ray.ObjectRef, tuple[int, float]] = {}
        self._num_open = Counter[int]()  # of a unit: its items that are on their way, and its reader
        self.num_done = 0
        """Number of units that nothing is left to do of."""
        self._read_task: Any = ray.remote(read_items).options(
            num_cpus=READ_CPUS, num_returns="streaming", _generator_backpressure_num_objects=_ITEMS_PER_READER
        )
        # Writing reserves no CPU: it might otherwise wait for one that a reader holds, which waits for the pool.
        self._write_task: Any = ray.remote(write_result).options(num_cpus=0)
        # In the object store once; as part of a task it would be sent with every task.
        self._read, self._write = (stage and ray.put(stage) for stage in (stages.read, stages.write))
        self._model = stages.model
        self._num_workers = self._max_readers = min(pool.num_workers, len(units))
        if stages.read is not None:
            self._num_workers = pool.num_workers  # a unit may have more than one item
            free = ray.cluster_resources().get("CPU", 0) - pool.num_workers * pool.cpus_per_worker
            self._max_readers = max(1, min(int(free / READ_CPUS), _READERS_PER_WORKER * pool.num_workers))
        self._starting = [self._start_worker() for _ in range(self._num_workers)]
        self._idle: list[Any] = []

    def outcomes(self) -> Generator[Outcome, None, None]:
        """Yields the outcome of every item; closing the generator ends readers and workers."""
        try:
            while self._waiting or self._readers or self._ready or self._running or self._writing:
                self._start_readers()
                self._admit_workers()
                self._feed_workers()
                # Items of a reader are fetched only while workers need them: until then they wait with the reader.
                readers = self._readers if len(self._ready) < self._num_workers else ()
                if not (waitables := [*readers, *self._writing, *self._running]):
                    time.sleep(_SECONDS_BETWEEN_LOOKS)  # everything is ready for workers that are being started
                    continue
                timeout = _SECONDS_BETWEEN_LOOKS if self._starting else None
                done, _ = ray.wait(waitables, fetch_local=False, timeout=timeout)
                if not done:
                    continue
                ready = done[0]
                if ready in self._readers:
                    self._take_item(ready)
                elif ready in self._running:
                    yield from self._take_result(ready)
                else:
                    yield self._finish(ready, *self._writing.pop(ready))
        finally:
            for reader in self._readers:
                ray.cancel(reader, force=True)
            for worker in [*self._starting, *self._idle, *(worker for worker, *_ in self._running.values())]:
                ray.kill(worker)

    def _start_worker(self) -> Any:
        actor: Any = ray.remote(Worker).options(
            num_cpus=self._pool.cpus_per_worker,
            num_gpus=self._pool.num_gpus,
            max_restarts=_NUM_RETRIES,
            max_task_retries=_NUM_RETRIES,
            runtime_env={"env_vars": CPU_ENVIRONMENT},
        )
        return actor.remote(self._model, max(1, int(self._pool.cpus_per_worker)))

    def _admit_workers(self) -> None:
        """Move the workers that have started to those that may be called."""
        started = [worker for worker in self._starting if has_started(worker)]
        self._idle += started
        self._starting = [worker for worker in self._starting if worker not in started]

    def _start_readers(self) -> None:
        while self._waiting and len(self._readers) + len(self._ready) < self._max_readers:
            number = self._waiting.popleft()
            self._num_open[number] += 1
            if self._read is None:
                self._ready.append((number, (self._units[number], 0)))
            else:
                self._readers[self._read_task.remote(self._read, self._units[number])] = number

    def _take_item(self, reader: ray.ObjectRefGenerator) -> None:
        number = self._readers[reader]
        # If the item could not be read, the error is raised in the worker that is to get it.
        if not reader.is_finished():
            self._ready.append((number, next(reader)))
            self._num_open[number] += 1
        if reader.is_finished():
            del self._readers[reader]
            self._close(number)

    def _feed_workers(self) -> None:
        while self._idle and self._ready:
            worker, (number, item) = self._idle.pop(), self._ready.popleft()
            result, seconds = worker.run.options(num_returns=2).remote(item)
            self._running[seconds] = (worker, number, result)

    def _take_result(self, ready: ray.ObjectRef) -> Generator[Outcome, None, None]:
        worker, number, result = self._running.pop(ready)
        try:
            seconds, retries = ray.get(ready)
            RETRIES.add(retries)
        except RayError as error:
            with suppress(RayError):
                ray.get(result)  # else Ray logs it as an error that nobody has seen
            if isinstance(error, RayActorError):
                self._starting.append(self._start_worker())
            else:
                self._idle.append(worker)
            self._close(number)
            yield Outcome(number, None, 0.0, describe_error(error))
            return
        self._idle.append(worker)
        self._feed_workers()  # before anything else, so that the worker does not wait for the driver
        if self._write is None:
            yield self._finish(result, number, seconds)
        else:
            self._writing[self._write_task.remote(self._write, result)] = (number, seconds)

    def _finish(self, reference: ray.ObjectRef, number: int, seconds: float) -> Outcome:
        self._close(number)
        try:
            value = ray.get(reference)
            if self._write is not None:
                value, retries = value
                RETRIES.add(retries)
            return Outcome(number, value, seconds, "")
        except RayError as error:
            return Outcome(number, None, seconds, describe_error(error))

    def _close(self, number: int) -> None:
        self._num_open[number] -= 1
        self.num_done += self._num_open[number] == 0


def describe_error(error: RayError) -> str:
    """Returns the reason of a failure in one line: type and text of what was raised, or that the process died."""
    cause = getattr(error, "cause", None)
    if cause is None:  # Ray's message says in its first line that a process died; details follow
        return str(error).strip().splitlines()[0]
    return " ".join(f"{type(cause).__name__}: {cause}".split())
