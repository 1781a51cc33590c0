"""Describe problems with the content of data, count them by kind, and reject a source that has too many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

NUM_EXAMPLES = 5
"""Maximum number of examples of problems that are kept for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Data that could not be read as a record."""

    kind: StrEnum
    """Kind of the problem; each data format has its own enumeration of kinds."""
    where: str
    """Name of the affected record, archive member or archive, relative to the URI that is read."""
    detail: str
    """Explanation for a human reader."""
    count: int = 1
    """Number of records that are affected; it exceeds 1 only where that number had to be estimated."""


def note(problem: Problem, problems: Counter[str], examples: list[str]) -> None:
    """Add a problem to the counts by kind, and to the examples as long as there are fewer than 5 of them."""
    problems[problem.kind] += problem.count
    if len(examples) < NUM_EXAMPLES:
        examples.append(f"{problem.where} ({problem.kind}: {problem.detail})")


class Reading(Protocol):
    """Summary of reading one archive: how many records were readable, and the problems with the others."""

    @property
    def path(self) -> str: ...
    @property
    def num_records(self) -> int: ...
    @property
    def problems(self) -> Mapping[str, int]: ...
    @property
    def examples(self) -> Sequence[str]: ...


class TooManyProblemsError(RuntimeError):
    """Raised when more records were unreadable than the configuration allows, or when none was readable."""


def check_problems(
    source: str,
    readings: Sequence[Reading],
    max_bad_share: float,
    *,
    field: str = "max_bad_share",
    noun: str = "document",
) -> None:
    """Reject a source with too large a share of unreadable records, or with no readable record at all.

    Args:
        source: path or URI of what was read, for the error message.
        readings: one summary per archive.
        max_bad_share: largest allowed share of unreadable records, in [0, 1].
        field: name of the configuration field that `max_bad_share` comes from, for the error message.
        noun: word for one record, for the error message.

    Raises:
        TooManyProblemsError: if too many records are unreadable; the message names the share, the kinds of problems and
            the worst archives.
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
