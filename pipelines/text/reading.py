"""Read documents from text archives, record by record.

An archive is one file: JSON lines (plain, gzip or zstandard), a tar of such files (the layout of OpenWebText2),
Parquet, or plain text, which is one document. Real downloads are often truncated and contain broken records. Each
defect in the *content* is therefore yielded by the same iterator as a `Problem`, and as little as possible is lost:
one record, or the rest of a damaged stream. Errors in the *request* (no such path, no permission, an unknown suffix)
raise exceptions.

Nothing is extracted to disk or unpickled, and memory use is limited to one record and one read buffer (for Parquet,
the pages of one column chunk), whatever the size of the archive.
"""

from __future__ import annotations

import itertools
import json
import tarfile
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.archives import NUM_NAMES_SHOWN, Archive, ArchiveFormat, describe_names, format_of
from pipelines.decompression import DamagedError, Readable, decompress
from pipelines.object_store import open_for_reading
from pipelines.parts import WHOLE, Part
from pipelines.problems import Problem
from pipelines.storage import relative, resolve
from pipelines.tars import tar_members
from pipelines.text.lines import MAX_RECORD_BYTES, decode, read_line_range, split_lines
from pipelines.text.parts import PARQUET_ERRORS

PARQUET_ROWS_PER_BATCH = 8  # Each row may have MAX_RECORD_BYTES; batches of 64 rows are less than twice as fast.
_NUM_FIELDS_SHOWN, _NUM_CHARACTERS_SHOWN = 8, 40

MEMBER_SUFFIXES = {
    ".jsonl": ArchiveFormat.JSONL,
    ".jsonl.gz": ArchiveFormat.JSONL_GZ,
    ".zst": ArchiveFormat.JSONL_ZST,
}
"""Mapping from the suffix of a tar's member to its format.

`.zst` covers both `.jsonl.zst` and names such as `1.zst` in archives written by lm_dataformat.
"""


class ProblemKind(StrEnum):
    """Kinds of problems with an archive's content."""

    TRUNCATED_ARCHIVE = "truncated_archive"
    """A stream ends early or cannot be decoded further; the records before that place were yielded."""
    INVALID_UTF8 = "invalid_utf8"
    INVALID_JSON = "invalid_json"
    MISSING_TEXT = "missing_text"
    EMPTY_DOCUMENT = "empty_document"
    OVERSIZED_RECORD = "oversized_record"
    IRREGULAR_MEMBER = "irregular_member"
    """The member is a link, a sparse file or a device, although its name is that of a member to be read."""
    EMPTY_ARCHIVE = "empty_archive"
    UNREADABLE_ARCHIVE = "unreadable_archive"
    """No part of the archive can be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text."""

    key: str
    """`<archive path relative to the URI>[/<member>]:<index of the record>`: unique below the URI, stable over runs."""
    text: str
    """The text, which is never empty and can always be encoded as UTF-8."""


def read_documents(
    uri: str, archive: Archive, *, text_field: str = "text", part: Part = WHOLE
) -> Iterator[Document | Problem]:
    """Stream the documents of an archive, or of a part of it, in stored order, together with the problems.

    The text of a record is a string, or a list of strings, which are joined by blank lines as lm_dataformat does. A
    JSON record may also be a bare string. Blank lines are not records.

    Args:
        uri: the URI that `archive` was listed from; it determines the filesystem, and the directory that keys are
            relative to.
        archive: one of `list_archives(uri)`.
        text_field: the field of a JSON record, or the column of a Parquet file, that holds the text.
        part: the part to read, one of `list_parts(uri, [archive])`. Reading all of them in order yields what reading
            the whole archive does, except that records of JSON lines are counted from the beginning of their part.

    Raises:
        OSError: at the first step of the iteration if the file cannot be opened, and at any step if reading from the
            filesystem fails. For Parquet a failed read is yielded as a problem instead, because its reader does not
            distinguish it from corrupt bytes.
    """
    is_empty = True
    for item in _read_part(uri, archive, text_field, part):
        is_empty = False
        yield item
    if is_empty and part.is_whole:
        yield report_empty(relative(archive.path, resolve(uri)[1]))


def report_empty(where: str) -> Problem:
    """Return the problem of an archive without any record."""
    return Problem(kind=ProblemKind.EMPTY_ARCHIVE, where=where, detail="the archive holds no record")


def _read_part(uri: str, archive: Archive, text_field: str, part: Part) -> Iterator[Document | Problem]:
    filesystem, root = resolve(uri)
    name = relative(archive.path, root)
    if archive.format is ArchiveFormat.PARQUET:
        with filesystem.open_input_file(archive.path) as native:
            yield from _read_parquet(native, name, text_field, part)
        return
    with open_for_reading(filesystem, archive.path, stop=part.stop) as file:
        if archive.format is ArchiveFormat.PLAIN:
            yield _read_plain(file, f"{name}:0")
        elif archive.format is ArchiveFormat.TAR:
            file.seek(part.start)
            yield from _read_tar(file, name, text_field, part)
        elif archive.format is ArchiveFormat.JSONL:
            where = f"{name}@{part.start}" if part.start else name
            chunks = read_line_range(file, part.start, archive.num_bytes if part.stop is None else part.stop)
            yield from _read_lines(chunks, where, text_field, itertools.count())
        else:
            chunks = decompress(file, archive.num_bytes, archive.format)
            yield from _read_lines(chunks, name, text_field, itertools.count())


# ---- from a record to a document -------------------------------------------------------------------------------------


def _parse_line(line: bytes | None, where: str, text_field: str) -> Document | Problem:
    if line is None:
        return _report_oversized(where)
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Problem(kind=ProblemKind.INVALID_UTF8, where=where, detail=str(error))
    except (ValueError, RecursionError) as error:  # RecursionError means that brackets are nested too deeply.
        return Problem(kind=ProblemKind.INVALID_JSON, where=where, detail=str(error))
    if isinstance(record, str):
        return _check_text(record, where, "the record")
    if not isinstance(record, dict):
        detail = f"the record is a {type(record).__name__}; expected an object or a string"
        return Problem(kind=ProblemKind.MISSING_TEXT, where=where, detail=detail)
    if text_field not in record:
        detail = f"no field {text_field!r}; the record has {_format_fields(record)}"
        return Problem(kind=ProblemKind.MISSING_TEXT, where=where, detail=detail)
    return _check_text(record[text_field], where, f"field {text_field!r}")


def _check_text(value: object, where: str, label: str) -> Document | Problem:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = "\n\n".join(value)
    if not isinstance(value, str):
        detail = f"{label} is a {type(value).__name__}; expected a string or a list of strings"
        return Problem(kind=ProblemKind.MISSING_TEXT, where=where, detail=detail)
    if not value.strip():
        return Problem(kind=ProblemKind.EMPTY_DOCUMENT, where=where, detail=f"{label} is empty or only whitespace")
    try:
        num_bytes = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:  # JSON can encode half of a surrogate pair, which no tokenizer accepts.
        return Problem(kind=ProblemKind.INVALID_UTF8, where=where, detail=str(error))
    return _report_oversized(where) if num_bytes > MAX_RECORD_BYTES else Document(key=where, text=value)


def _format_fields(names: Collection[str]) -> str:
    """Format the first few field names of a record or a file for a message, truncating long names."""
    shown = ", ".join(ascii(name[:_NUM_CHARACTERS_SHOWN]) for name in itertools.islice(names, _NUM_FIELDS_SHOWN))
    return f"{shown}{', …' * (len(names) > _NUM_FIELDS_SHOWN)}" if names else "no fields"


def _report_oversized(where: str) -> Problem:
    detail = f"the record is longer than {MAX_RECORD_BYTES} bytes"
    return Problem(kind=ProblemKind.OVERSIZED_RECORD, where=where, detail=detail)


def _read_plain(stream: Readable, where: str) -> Document | Problem:
    data = stream.read(MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        return _report_oversized(where)
    try:
        return _check_text(decode(data), where, "the file")
    except UnicodeDecodeError as error:
        return Problem(kind=ProblemKind.INVALID_UTF8, where=where, detail=str(error))


# ---- JSON lines ------------------------------------------------------------------------------------------------------


def _read_lines(
    chunks: Iterator[bytes], name: str, text_field: str, indices: Iterator[int]
) -> Iterator[Document | Problem]:
    try:
        for line in split_lines(chunks):
            yield _parse_line(line, f"{name}:{next(indices)}", text_field)
    except DamagedError as error:
        yield Problem(kind=ProblemKind.TRUNCATED_ARCHIVE, where=name, detail=str(error))


# ---- tar -------------------------------------------------------------------------------------------------------------


def _read_tar(stream: Readable, name: str, text_field: str, part: Part) -> Iterator[Document | Problem]:
    # If a member's name occurs twice, the count of its records continues, so that keys stay unique.
    indices: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    others: list[str] = []  # The first few names of members that are not read, for the error message.
    num_others = 0
    try:
        for info, member in tar_members(stream, start=part.start, stop=part.stop):
            member_format = format_of(info.name, MEMBER_SUFFIXES)
            if member_format is None or info.isdir():
                num_others += 1
                if len(others) < NUM_NAMES_SHOWN:
                    others.append(info.name)
                continue
            where, index = f"{name}/{info.name}", indices[info.name]
            if not info.isreg() or info.sparse is not None:
                detail = "a link, a sparse file or a device, not a plain file"
                yield Problem(kind=ProblemKind.IRREGULAR_MEMBER, where=where, detail=detail)
                continue
            yield from _read_lines(decompress(member, info.size, member_format), where, text_field, index)
            if member.is_cut:  # The damage was already reported for the member, and the tar cannot be read further.
                return
    except tarfile.TarError as error:
        yield Problem(kind=ProblemKind.TRUNCATED_ARCHIVE, where=name, detail=f"corrupt tar: {error}")
    else:
        if part.is_whole and not indices:
            detail = f"no member ends in one of {', '.join(MEMBER_SUFFIXES)}; {describe_names(others, num_others)}"
            yield Problem(kind=ProblemKind.EMPTY_ARCHIVE, where=name, detail=detail)


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def _read_parquet(file: pa.NativeFile, name: str, text_field: str, part: Part) -> Iterator[Document | Problem]:
    try:
        # With a buffer size, the reader streams the pages of a column instead of loading those of a whole row group.
        table = pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
        columns = table.schema_arrow.names
    except PARQUET_ERRORS as error:
        yield Problem(kind=ProblemKind.UNREADABLE_ARCHIVE, where=name, detail=f"corrupt parquet: {error}")
        return
    if text_field not in columns:
        detail = f"no column {text_field!r}; the file has {_format_fields(columns)}"
        yield Problem(kind=ProblemKind.UNREADABLE_ARCHIVE, where=name, detail=detail)
        return
    try:
        groups = range(part.start, table.num_row_groups if part.stop is None else part.stop)
        indices = itertools.count(sum(table.metadata.row_group(group).num_rows for group in range(part.start)))
        for batch in table.iter_batches(PARQUET_ROWS_PER_BATCH, row_groups=groups, columns=[text_field]):
            for value in batch.column(text_field):
                where = f"{name}:{next(indices)}"
                try:
                    text = value.as_py()
                    if isinstance(text, bytes):
                        text = text.decode("utf-8")
                except UnicodeDecodeError as error:
                    yield Problem(kind=ProblemKind.INVALID_UTF8, where=where, detail=str(error))
                else:
                    yield _check_text(text, where, f"column {text_field!r}")
    except PARQUET_ERRORS as error:
        yield Problem(kind=ProblemKind.TRUNCATED_ARCHIVE, where=name, detail=f"corrupt parquet: {error}")
