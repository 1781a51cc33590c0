"""Problems with the content of data: describe them, count them by kind, list every lost record, refuse too many.

Every lost record is written to a file of JSON lines beside the prepared data while its archive is read, one file per
archive, so that the losses can be listed later at any time in the order of the archives, no matter how many of these
were read in parallel.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Protocol

from pipelines.storage import resolve

NUM_EXAMPLES = 5
"""Maximum number of examples of problems that are kept for messages."""

_COPY_BYTES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Data that could not be read as a record."""

    kind: StrEnum
    """Kind of the problem; each data format has its own enumeration of kinds."""
    where: str
    """Name of the affected record, archive member or archive, relative to the URI that is read."""
    detail: str
    count: int = 1
    """Number of records that are affected; it exceeds 1 only where several are lost at once, or had to be estimated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedArchive(Problem):
    """Problem of an archive, or of a member of one, that cannot be read further."""

    num_bytes_unread: int
    """Number of stored bytes behind that place; 0 where the archive ends early, so that it is not known."""


def printable(name: str) -> str:
    """Return a name as text that every terminal shows as it is: bytes that are not UTF-8 and control characters escaped."""
    if name.isprintable():
        return name
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def note(problem: Problem, problems: Counter[str], examples: list[str]) -> None:
    """Add a problem to the counts by kind, and to the examples as long as there are fewer than 5 of them."""
    problems[problem.kind.value] += problem.count
    if len(examples) < NUM_EXAMPLES:
        examples.append(printable(f"{problem.where} ({problem.kind.value}: {problem.detail})"))


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return counts by kind as text, such as `2 invalid_json, 1 missing_text`; `none` if there are none."""
    return printable(", ".join(f"{number} {kind!s}" for kind, number in sorted(counts.items()))) or "none"


class LostRecords:
    """Counts the lost records of one archive by kind, keeps the first few as examples, and writes all of them to a file.

    This is a context manager; the file is complete when the context exits.
    """

    def __init__(self, uri: str) -> None:
        self.problems, self.examples = Counter[str](), list[str]()
        self.num_bytes_unread: int | None = None
        """Number of bytes behind the places where the archive cannot be read further; None: it was read to its end."""
        filesystem, path = resolve(uri)
        self._stream = filesystem.open_output_stream(path)

    def __enter__(self) -> LostRecords:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.close()

    def add(self, archive: str, problem: Problem) -> None:
        """Count a problem of the archive at a path, and write it to the file."""
        note(problem, self.problems, self.examples)
        if isinstance(problem, TruncatedArchive):
            self.num_bytes_unread = (self.num_bytes_unread or 0) + problem.num_bytes_unread
        line = {
            "kind": problem.kind,
            "archive": archive,
            "where": problem.where,
            "message": problem.detail,
            "count": problem.count,
        }
        self._stream.write(json.dumps(line).encode() + b"\n")


def lost_name(prepared: str) -> str:
    """Return the name (or URI) of the file of lost records that belongs to a prepared file of this name (or URI)."""
    return f"{prepared}.losses.jsonl"


def list_lost(directory: str, files: Sequence[str], destination: str) -> None:
    """Concatenate files of lost records, given relative to a prepared directory, into one file, which is replaced."""
    target, target_path = resolve(destination)
    with target.open_output_stream(target_path) as sink:
        for file in files:
            filesystem, path = resolve(f"{directory}/{file}")
            with filesystem.open_input_stream(path) as stream:
                while data := stream.read(_COPY_BYTES):
                    sink.write(data)


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


class Unread(Reading, Protocol):
    """An archive of which a part may not have been reached."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def num_bytes_unread(self) -> int | None:
        """Number of bytes behind the places where it cannot be read further (`TruncatedArchive`); None: read to its end."""
        ...


def estimate_unread(archives: Sequence[Unread], kind: StrEnum, noun: str) -> Iterator[Problem | None]:
    """Yield, for every archive that could not be read to its end, the problem of its unreachable records, else None.

    Their number is estimated from bytes and the mean size of the records that were read. Where an archive is damaged before
    its end, the number of remaining bytes is known. Where it ends early, the missing bytes are the difference to the median
    size of the intact archives or, if there are none, as many as were read, which is what a cut at a random place costs on
    average; where no record was read, it is the smaller of both. At least one record is missing.
    """
    intact = [archive for archive in archives if archive.num_bytes_unread is None and archive.num_records]
    sizes = [archive.num_bytes or 0 for archive in intact]  # Some filesystems do not report sizes.
    median = statistics.median(sizes) if intact else 0
    records_per_byte = sum(archive.num_records for archive in intact) / max(1, sum(sizes))
    for archive in archives:
        if (num_bytes := archive.num_bytes_unread) is None:
            yield None
            continue
        num_read = max(0, (archive.num_bytes or 0) - num_bytes)
        if num_bytes:
            basis = f"the {num_bytes} bytes behind the damage"
        elif median:
            num_bytes, basis = max(0, round(median) - num_read), f"the {median:.0f} bytes of a whole archive"
            if not archive.num_records:  # What no record was read of may be no such archive at all.
                num_bytes = min(num_bytes, num_read)
        else:
            num_bytes, basis = num_read, "nothing, as its whole size is unknown: as many as could be read"
        number = round(num_bytes * (archive.num_records / num_read if archive.num_records else records_per_byte))
        detail = f"about {max(1, number)} {noun}s, estimated from {basis}"
        yield Problem(kind=kind, where=archive.path.rsplit("/", 1)[-1], detail=detail, count=max(1, number))


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
    """Reject a source with too large a share of unreadable records, or with no readable record at all."""
    num_bad = sum(sum(reading.problems.values()) for reading in readings)
    num_records = sum(reading.num_records for reading in readings)
    num_seen = num_bad + num_records
    worst = sorted(readings, key=lambda reading: -sum(reading.problems.values()))[:3]
    where = "; ".join(
        f"{printable(reading.path)}: {describe_counts(reading.problems)}, for example {', '.join(reading.examples[:2])}"
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
