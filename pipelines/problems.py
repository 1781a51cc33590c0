"""Problems with the content of data: describe them, count them by kind, list every lost record, refuse too many.

Every lost record is written to a file of JSON lines beside the prepared data while its archive is read, one file per
archive, so that the losses can be listed later at any time in the order of the archives, no matter how many of these
were read in parallel.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
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
    """Explanation for a human reader."""
    count: int = 1
    """Number of records that are affected; it exceeds 1 only where several are lost at once, or had to be estimated."""


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
    """Count the lost records of one archive by kind, keep the first few as examples, and write all of them to a file.

    This is a context manager; the file is complete when the context exits.
    """

    def __init__(self, uri: str) -> None:
        filesystem, path = resolve(uri)
        self._stream = filesystem.open_output_stream(path)

    def __enter__(self) -> LostRecords:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.close()

    def add(self, archive: str, problem: Problem, problems: Counter[str], examples: list[str]) -> None:
        """Count a problem and write it to the file.

        Args:
            archive: path of the archive that contains the problem.
            problem: the problem to record.
            problems, examples: counts and examples, which are updated in place as by `note`.
        """
        note(problem, problems, examples)
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
    """Concatenate several files of lost records of a prepared directory into one file.

    Args:
        directory: path or URI of the prepared directory.
        files: names of the files to read, relative to `directory`, in the order in which they are concatenated.
        destination: path or URI of the file to write. Its directory must exist; an existing file is replaced.

    Raises:
        OSError: if `destination` cannot be written.
    """
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
