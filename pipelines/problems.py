"""Problems with the content of data: describe them, count them by kind, list every lost record, refuse too many.

Every lost record is written to a file of JSON lines beside the prepared data while its archive is read, one file per
archive, so that the losses can be listed later at any time in the order of the archives, no matter how many of these
were read in parallel.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from pipelines.storage import resolve

NUM_EXAMPLES = 5
"""Maximum number of examples of problems that are kept for messages."""

_NUM_FIELDS_SHOWN, _NUM_CHARACTERS_SHOWN = 8, 40


Entry = TypeVar("Entry", bound=Any)


class ProblemKind(StrEnum):
    """Kinds of problems with the content of data."""

    # Archives and their members.
    TRUNCATED_ARCHIVE = "truncated_archive"
    """It ends early or cannot be decoded further; the records before that place were yielded."""
    UNREAD_DOCUMENT = "unread_document"
    """The document lies behind the place where an archive cannot be read further; their number is estimated from bytes."""
    UNREAD_SAMPLE = "unread_sample"
    """The same of an image with its captions."""
    UNREAD_REVIEW = "unread_review"
    """The review is missing in an archive that cannot be read to its end."""
    UNREADABLE_ARCHIVE = "unreadable_archive"
    """No part of the archive can be read."""
    EMPTY_ARCHIVE = "empty_archive"
    IRREGULAR_MEMBER = "irregular_member"
    """The member is a link, a sparse file or a device, although its name is that of a member to be read."""
    OVERSIZED_MEMBER = "oversized_member"
    UNREADABLE_FILE = "unreadable_file"
    """The file was listed but cannot be opened: it was deleted, or is not permitted."""
    # Records of text, and lines.
    INVALID_UTF8 = "invalid_utf8"
    INVALID_JSON = "invalid_json"
    MISSING_TEXT = "missing_text"
    EMPTY_DOCUMENT = "empty_document"
    OVERSIZED_RECORD = "oversized_record"
    MISSING_FIELD = "missing_field"
    EMPTY_SENTENCE = "empty_sentence"
    UNKNOWN_LABEL = "unknown_label"
    # Images with captions.
    MISSING_IMAGE = "missing_image"
    MISSING_CAPTION = "missing_caption"
    APART = "image_and_caption_apart"
    """Image and caption of the sample are in the tar, with other members between them."""
    EMPTY_CAPTION = "empty_caption"
    INVALID_CAPTION = "invalid_caption"
    """One of several captions is no text."""
    DUPLICATED_KEY = "duplicated_key"
    ABSENT_IMAGE = "absent_image"
    """The JSON file of captions names the image, but no archive holds it."""
    INVALID_RECORD = "invalid_record"
    """The record of the JSON file of captions names no image, or has no text."""
    # The bytes of an image.
    EMPTY_IMAGE = "empty_image"
    CORRUPT_IMAGE = "corrupt_image"
    TOO_MANY_PIXELS = "too_many_pixels"
    TOO_MUCH_MEMORY = "too_much_memory"
    """Decoding the image would take too much memory."""
    TOO_MANY_SCANS = "too_many_scans"
    """Decoding the image would take too much time, because a progressive JPEG has so many scans of so many pixels."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Data that could not be read as a record."""

    kind: ProblemKind
    where: str
    """Name of the affected record, archive member or archive, relative to the URI that is read."""
    detail: str
    count: int = 1
    """Number of records that are affected; it exceeds 1 only where several are lost at once, or had to be estimated."""
    num_bytes_unread: int | None = None
    """Of an archive, or a member of one, that cannot be read further: number of stored bytes behind that place; 0 where it
    ends early, so that it is not known."""


def printable(name: str) -> str:
    """Return a name as text that every terminal shows as it is: bytes that are not UTF-8 and control characters escaped."""
    if name.isprintable():
        return name
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def name_type(value: object) -> str:
    """Return what a JSON value is, for messages."""
    return "null" if value is None else f"a {type(value).__name__}"


def format_fields(names: Collection[str]) -> str:
    """Format the first few field names of a record or a file for a message, truncating long names."""
    shown = ", ".join(ascii(name[:_NUM_CHARACTERS_SHOWN]) for name in itertools.islice(names, _NUM_FIELDS_SHOWN))
    return f"{shown}{', …' * (len(names) > _NUM_FIELDS_SHOWN)}" if names else "no fields"


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

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def add(self, archive: str, problem: Problem) -> None:
        """Count a problem of the archive at a path, and write it to the file."""
        note(problem, self.problems, self.examples)
        if problem.num_bytes_unread is not None:
            self.num_bytes_unread = (self.num_bytes_unread or 0) + problem.num_bytes_unread
        found = {"kind": problem.kind, "archive": archive, "where": problem.where, "message": problem.detail}
        self._stream.write(json.dumps(found | {"count": problem.count}).encode() + b"\n")

    def add_to(self, entry: Entry, problems: Iterable[Problem]) -> Entry:
        """Return the summary of an archive (a `Reading` that is a dataclass) with further problems, which are listed."""
        counts, examples = Counter(entry.problems), list(entry.examples)
        for problem in problems:
            self.add(entry.path, problem)
            note(problem, counts, examples)
        return replace(entry, problems=dict(counts), examples=examples)


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
                shutil.copyfileobj(stream, sink)


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


def estimate_unread(archives: Sequence[Any], kind: ProblemKind, noun: str) -> Iterator[Problem | None]:
    """Yield, for every archive that could not be read to its end, the problem of its unreachable records, else None.

    Their number is estimated from bytes and the mean size of the records that were read. Where an archive is damaged before
    its end, the number of remaining bytes is known. Where it ends early, the missing bytes are the difference to the median
    size of the intact archives or, if there are none, as many as were read, which is what a cut at a random place costs on
    average; where no record was read, it is the smaller of both. At least one record is missing. An archive is a `Reading`
    with `num_bytes` and `num_bytes_unread`, which is None if it was read to its end (`LostRecords`).
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
