"""What was wrong with the content of data: one record of it, counts by kind, and the share past which it is too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

_NUM_EXAMPLES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that is not a record."""

    kind: StrEnum
    where: str
    """The record, or the archive or its member, relative to the URI that is read."""
    detail: str
    count: int = 1
    """How many records it stands for: more than one where only their number can be estimated."""


def note(problem: Problem, problems: Counter[str], examples: list[str]) -> None:
    """Count a problem by kind and remember the first few."""
    problems[problem.kind] += problem.count
    if len(examples) < _NUM_EXAMPLES:
        examples.append(f"{problem.where} ({problem.kind}: {problem.detail})")


class Reading(Protocol):
    """What was read from one archive, and what was not."""

    @property
    def path(self) -> str: ...
    @property
    def num_records(self) -> int: ...
    @property
    def problems(self) -> Mapping[str, int]: ...
    @property
    def examples(self) -> Sequence[str]: ...


class TooManyProblemsError(RuntimeError):
    """More records were unreadable than the configuration allows."""


def check_problems(
    source: str,
    readings: Sequence[Reading],
    max_bad_share: float,
    *,
    field: str = "data.max_bad_share",
    noun: str = "document",
) -> None:
    """Refuse a source in which too much was unreadable, or nothing readable was left.

    Args:
        source: what was read, for the message.
        field: how the person who gave `max_bad_share` knows it.
        noun: what a record is.

    Raises:
        TooManyProblemsError: naming the share, the kinds and the archives.
    """
    num_bad = sum(sum(reading.problems.values()) for reading in readings)
    num_records = sum(reading.num_records for reading in readings)
    num_seen = num_bad + num_records
    worst = sorted(readings, key=lambda reading: -sum(reading.problems.values()))[:3]
    where = "; ".join(
        f"{reading.path}: {dict(reading.problems)}, for example {', '.join(reading.examples[:2])}"
        for reading in worst
        if reading.problems
    )
    if num_records == 0:
        raise TooManyProblemsError(f"{source} holds no readable {noun}. {where}")
    if num_bad > max_bad_share * num_seen:
        raise TooManyProblemsError(
            f"{num_bad} of {num_seen} records of {source} are unreadable ({num_bad / num_seen:.2%}), more than "
            f"{field} = {max_bad_share:.2%}. {where}"
        )
