"""Count the requests to object stores that were repeated because the store failed, and say so.

Every process counts its own (`RETRIES`), by store and by reason. The counts of a reading task travel with its next
batch (`pipelines.stream`), those of a preparing task with its result (`pipelines.recorded_tasks`), and those of a
scoring job with what its stages hand on (`jobs/scoring/stages.py`), as a line of JSON, to the process that asked for
it, which adds them to its own. So they arrive where a person can see them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

Counts: TypeAlias = dict[str, dict[str, int]]
"""Store (such as `s3://bucket`) → reason (such as `slow_down`) → number of repeated requests. The last reason is last."""

SECONDS_BETWEEN_LINES = 60.0
"""Least number of seconds between two lines about repeated requests."""


class Retries:
    """Counts of repeated requests: those of this process, and those that it has received from others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: Counts = {}
        self._num_total = 0

    def __reduce__(self) -> str:
        """Pickle `RETRIES` by its name: functions that are sent to another process count there."""
        return "RETRIES"

    @property
    def num_total(self) -> int:
        """Number of all repeated requests so far."""
        return self._num_total

    def add(self, store: str, reason: str) -> None:
        """Count one request that is repeated; threads may do so at the same time."""
        self._merge({store: {reason: 1}})

    def receive(self, text: str) -> None:
        """Count what `take` has returned in another process."""
        if text:
            self._merge(json.loads(text))

    def take(self) -> str:
        """Return as JSON what was counted since the last call, so that it is counted once; empty if that is nothing."""
        with self._lock:
            taken, self._waiting = self._waiting, {}
        return json.dumps(taken) if taken else ""

    def _merge(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        with self._lock:
            merge_counts(self._waiting, counts)
            self._num_total += count_all(counts)


RETRIES = Retries()
"""The repeated requests that this process knows of."""


class RetryLog:
    """Adds up repeated requests, and says at most once a minute what is new.

    Args:
        say: function that shows a line to a person.
        totals: what was counted before, for example before a run was restarted.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        totals: Mapping[str, Mapping[str, int]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._clock = say, clock
        self._said_at: float | None = None
        self._unsaid: Counts = {}
        self.totals: Counts = {}
        """All that was counted."""
        merge_counts(self.totals, totals or {})

    def add(self, text: str) -> None:
        """Add what `Retries.take` has returned, which may be empty, and say what is new if the minute is over."""
        if text:
            counts = json.loads(text)
            merge_counts(self.totals, counts)
            merge_counts(self._unsaid, counts)
        if self._said_at is None or self._clock() - self._said_at >= SECONDS_BETWEEN_LINES:
            self.close()

    def close(self) -> None:
        """Say what was not said yet."""
        if self._unsaid:
            self._say(describe_retries(self._unsaid, num_total=count_all(self.totals)))
            self._said_at, self._unsaid = self._clock(), {}


def merge_counts(counts: Counts, more: Mapping[str, Mapping[str, int]]) -> None:
    """Add counts to others in place; the reasons of what is added become the last ones."""
    for store, reasons in more.items():
        here = counts.setdefault(store, {})
        for reason, number in reasons.items():
            here[reason] = here.pop(reason, 0) + number


def with_own_retries(counts: Mapping[str, Mapping[str, int]]) -> Counts:
    """Return counts, and added to them those that this process has not given away yet (`Retries.take`)."""
    own = RETRIES.take()
    total: Counts = {}
    for more in (counts, json.loads(own) if own else {}):
        merge_counts(total, more)
    return total


def count_all(counts: Mapping[str, Mapping[str, int]]) -> int:
    """Return the number of requests of all stores and reasons."""
    return sum(sum(reasons.values()) for reasons in counts.values())


def count_by_reason(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the number of requests by reason, over all stores."""
    numbers: dict[str, int] = {}
    for reasons in counts.values():
        for reason, number in reasons.items():
            numbers[reason] = numbers.get(reason, 0) + number
    return numbers


def describe_retries(counts: Mapping[str, Mapping[str, int]], *, num_total: int) -> str:
    """Describe repeated requests in one line, for a human reader.

    Args:
        counts: the requests to describe, at least one.
        num_total: number of all repeated requests so far.
    """
    parts = [
        f"{sum(reasons.values())} to {store} (last reason: {list(reasons)[-1]})" for store, reasons in counts.items()
    ]
    return f"requests to an object store failed and were repeated: {', '.join(parts)}; {num_total} so far"
