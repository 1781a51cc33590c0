"""Read documents from text archives, record by record.

An archive is one file: JSON lines (plain or compressed), a tar of such files (the layout of OpenWebText2), Parquet, or plain
text, which is one document. Each defect in the *content* is yielded by the same iterator as a `Problem`, and as little as
possible is lost: one record, or the rest of a damaged stream. Errors in the *request* (no such path, no permission, an
unknown suffix) raise exceptions. Nothing is extracted to disk or unpickled, and memory holds one record and one read buffer
(for Parquet, the pages of one column chunk), whatever the size of the archive.

Archives are divided into parts that can be prepared independently of each other, by the archive's bytes and PART_BYTES alone:
groups of members of a tar, ranges of lines of a JSON lines file, groups of row groups of a Parquet file. What is compressed
as a whole is one part.
"""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from pipelines.archives import NUM_NAMES_SHOWN, Archive, ArchiveFormat, describe_names, format_of, resolve_source
from pipelines.lines import (
    MAGIC_BYTES,
    MAX_RECORD_BYTES,
    DamagedError,
    compression_of,
    decode,
    open_decompressed,
    split_lines,
)
from pipelines.object_store import open_for_reading
from pipelines.problems import Problem, ProblemKind, format_fields, name_type, note
from pipelines.storage import relative
from pipelines.tars import member_end, num_bytes_behind, tar_members

PART_BYTES = 8 * 2**20
"""Number of stored bytes that complete a part. An archive that is not larger is one part."""

PARQUET_ROWS_PER_BATCH = 8  # Each row may have MAX_RECORD_BYTES; batches of 64 rows are less than twice as fast.
# A column chunk that is larger than this when it is decompressed, and so many times larger than it is stored, holds no
# text: its pages, which are decompressed as a whole, would take gigabytes.
_MAX_PARQUET_BYTES, _MAX_PARQUET_RATIO = 2**26, 100
# Errors by which a damaged Parquet file shows; the third, because the name of a column may be damaged too.
_PARQUET_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)
# Number of bytes to read at a time for the headers of a tar alone: one header, with an extended one of the usual size.
_HEADER_BYTES = 2**14
_NUM_THREADS = 16

MEMBER_SUFFIXES = {
    ".jsonl": ArchiveFormat.JSONL,
    ".jsonl.gz": ArchiveFormat.JSONL_GZ,
    ".json.gz": ArchiveFormat.JSONL_GZ,
    ".zst": ArchiveFormat.JSONL_ZST,
    ".jsonl.xz": ArchiveFormat.JSONL_XZ,
    ".jsonl.bz2": ArchiveFormat.JSONL_BZ2,
}
"""Mapping from the suffix of a tar's member to its format.

`.zst` covers both `.jsonl.zst` and names such as `1.zst` in archives written by lm_dataformat.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Range of an archive; its unit is bytes, or row groups for a Parquet file."""

    start: int = 0
    """Where the part begins: for a tar, a header; in a file of lines, any byte (`pipelines.lines`)."""
    stop: int | None = None
    """Where the next part begins. None for the last part, which reports how the archive ends."""

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole archive."""
        return self.start == 0 and self.stop is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text."""

    key: str
    """`<archive path relative to the URI>[/<member>]:<index of the record>`: unique below the URI, stable over runs."""
    text: str
    """The text, which is never empty and can always be encoded as UTF-8."""


def read_documents(
    uri: str, archive: Archive, *, text_field: str = "text", part: Part = Part()
) -> Iterator[Document | Problem]:
    """Stream the documents of an archive, or of a part of it, in stored order, together with the problems.

    The text of a record is a string, or a list of strings, which are joined by blank lines as lm_dataformat does. A JSON
    record may also be a bare string. Blank lines are not records. Reading all parts in order yields what reading the whole
    archive does, except that records of JSON lines are counted from the beginning of their part.

    Args:
        uri: the URI that `archive` was listed from, which keys are relative to.
        archive: one of `list_archives(uri)`.
        text_field: the field of a JSON record, or the column of a Parquet file, that holds the text.
        part: one of `list_parts(uri, [archive])`.

    Raises:
        OSError: if the file cannot be opened, or reading from the filesystem fails; for Parquet, a failed read is a problem.
    """
    is_empty = True
    for item in _read_part(uri, archive, text_field, part):
        is_empty = False
        yield item
    if is_empty and part.is_whole:
        yield report_empty(relative(archive.path, resolve_source(uri)[1]))


def readable_documents(
    source: str,
    archive: Archive,
    text_field: str,
    problems: Counter[str],
    examples: list[str],
) -> Iterator[Document]:
    """Yield the documents of :func:`read_documents`; counts and examples of the problems are updated in place."""
    for item in read_documents(source, archive, text_field=text_field):
        if isinstance(item, Problem):
            note(item, problems, examples)
        else:
            yield item


def report_empty(where: str) -> Problem:
    """Return the problem of an archive without any record."""
    return Problem(ProblemKind.EMPTY_ARCHIVE, where, "the archive holds no record")


def _read_part(uri: str, archive: Archive, text_field: str, part: Part) -> Iterator[Document | Problem]:
    filesystem, root = resolve_source(uri)
    name = relative(archive.path, root)
    if archive.format is ArchiveFormat.PARQUET:
        with filesystem.open_input_file(archive.path) as native:
            yield from _read_parquet(native, name, text_field, part)
        return
    with open_for_reading(filesystem, archive.path, stop=part.stop) as file:
        num_bytes = archive.num_bytes or 0  # Some filesystems do not report sizes.

        def num_unread() -> int:
            """Return how many bytes of the file were not read; 0 where it ends early."""
            return max(0, num_bytes - file.tell())

        if archive.format is ArchiveFormat.PLAIN:
            yield _read_plain(file, f"{name}:0")
        elif archive.format is ArchiveFormat.TAR:
            compression = None if part.start else compression_of(file.read(MAGIC_BYTES))
            file.seek(part.start)
            if compression:
                stream = open_decompressed(file, num_bytes, compression)
                yield from _read_tar(stream, name, text_field, part, lambda _: num_unread())
            else:
                behind = partial(num_bytes_behind, num_bytes=num_bytes)
                yield from _read_tar(file, name, text_field, part, behind)
        elif archive.format is ArchiveFormat.JSONL:
            where = f"{name}@{part.start}" if part.start else name
            lines = split_lines(file, part.start, num_bytes if part.stop is None else part.stop)
            yield from _read_lines(lines, where, text_field, itertools.count(), lambda: 0)
        else:
            lines = split_lines(open_decompressed(file, num_bytes, archive.format))
            yield from _read_lines(lines, name, text_field, itertools.count(), num_unread)


# ---- from a record to a document -------------------------------------------------------------------------------------


def _parse_line(line: bytes | None, where: str, text_field: str) -> Document | Problem:
    if line is None:
        return _report_oversized(where)
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Problem(ProblemKind.INVALID_UTF8, where, str(error))
    except (ValueError, RecursionError) as error:  # RecursionError means that brackets are nested too deeply.
        return Problem(ProblemKind.INVALID_JSON, where, str(error))
    if isinstance(record, str):
        return _check_text(record, where, "the record")
    if not isinstance(record, dict):
        detail = f"the record is {name_type(record)}; expected an object or a string"
        return Problem(ProblemKind.MISSING_TEXT, where, detail)
    if text_field not in record:
        detail = f"no field {text_field!r}; the record has {format_fields(record)}"
        return Problem(ProblemKind.MISSING_TEXT, where, detail)
    return _check_text(record[text_field], where, f"field {text_field!r}")


def _check_text(value: object, where: str, label: str) -> Document | Problem:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = "\n\n".join(value)
    if not isinstance(value, str):
        found = name_type(value)
        if isinstance(value, list):
            found = f"a list with a {next(type(part).__name__ for part in value if not isinstance(part, str))} in it"
        return Problem(ProblemKind.MISSING_TEXT, where, f"{label} is {found}; expected a string or a list of strings")
    if not value.strip():
        return Problem(ProblemKind.EMPTY_DOCUMENT, where, f"{label} is empty or only whitespace")
    try:
        num_bytes = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:  # JSON can encode half of a surrogate pair, which no tokenizer accepts.
        return Problem(ProblemKind.INVALID_UTF8, where, str(error))
    return _report_oversized(where) if num_bytes > MAX_RECORD_BYTES else Document(key=where, text=value)


def _report_oversized(where: str) -> Problem:
    return Problem(ProblemKind.OVERSIZED_RECORD, where, f"the record is longer than {MAX_RECORD_BYTES} bytes")


def _read_plain(stream: BinaryIO, where: str) -> Document | Problem:
    data = stream.read(MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        return _report_oversized(where)
    try:
        return _check_text(decode(data), where, "the file")
    except UnicodeDecodeError as error:
        return Problem(ProblemKind.INVALID_UTF8, where, str(error))


# ---- JSON lines ------------------------------------------------------------------------------------------------------


def _read_lines(
    lines: Iterator[bytes | None], name: str, text_field: str, indices: Iterator[int], num_unread: Callable[[], int]
) -> Iterator[Document | Problem]:
    try:
        for line in lines:
            yield _parse_line(line, f"{name}:{next(indices)}", text_field)
    except DamagedError as error:
        yield _report_truncated(name, str(error), num_unread())


def _report_truncated(where: str, detail: str, num_unread: int) -> Problem:
    return Problem(ProblemKind.TRUNCATED_ARCHIVE, where, detail, num_bytes_unread=num_unread)


# ---- tar -------------------------------------------------------------------------------------------------------------


def _read_tar(
    stream: BinaryIO, name: str, text_field: str, part: Part, num_unread: Callable[[int], int]
) -> Iterator[Document | Problem]:
    """Read a tar; `num_unread` says how many stored bytes lie behind the end of a member."""
    # If a member's name occurs twice, the count of its records continues, so that keys stay unique.
    indices: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    others: list[str] = []  # The first few names of members that are not read, for the error message.
    num_others = end = 0
    try:
        for info, member in tar_members(stream, start=part.start, stop=part.stop):
            end = member_end(info)
            member_format = format_of(info.name, MEMBER_SUFFIXES)
            if member_format is None or info.isdir():
                num_others += 1
                if len(others) < NUM_NAMES_SHOWN:
                    others.append(info.name)
                continue
            where, index = f"{name}/{info.name}", indices[info.name]
            if not info.isreg() or info.sparse is not None:
                detail = "a link, a sparse file or a device, not a plain file"
                yield Problem(ProblemKind.IRREGULAR_MEMBER, where, detail)
                continue
            lines = split_lines(open_decompressed(member, info.size, member_format))
            yield from _read_lines(lines, where, text_field, index, member.num_unread)
            if member.is_cut:  # The damage was already reported for the member, and the tar cannot be read further.
                return
    except (tarfile.TarError, DamagedError) as error:  # The second, if the tar is compressed as a whole.
        yield _report_truncated(name, f"corrupt tar: {error}", num_unread(end))
    else:
        if part.is_whole and not indices:
            detail = f"no member ends in one of {', '.join(MEMBER_SUFFIXES)}; {describe_names(others, num_others)}"
            yield Problem(ProblemKind.EMPTY_ARCHIVE, name, detail)


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def _read_parquet(file: pa.NativeFile, name: str, text_field: str, part: Part) -> Iterator[Document | Problem]:
    try:
        # With a buffer size, the reader streams the pages of a column instead of loading those of a whole row group.
        table = pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
        columns = table.schema_arrow.names
    except _PARQUET_ERRORS as error:
        yield Problem(ProblemKind.UNREADABLE_ARCHIVE, name, f"corrupt parquet: {error}")
        return
    if text_field not in columns:
        detail = f"no column {text_field!r}; the file has {format_fields(columns)}"
        yield Problem(ProblemKind.UNREADABLE_ARCHIVE, name, detail)
        return
    groups = range(part.start, table.num_row_groups if part.stop is None else part.stop)
    first = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
    last = first + sum(table.metadata.row_group(group).num_rows for group in groups)
    try:
        for group in groups:
            number = first - 1
            metadata = table.metadata.row_group(group)
            problem = _check_row_group(metadata, text_field, f"{name}:{first}")
            if problem is not None:
                yield problem
            else:
                batches = table.iter_batches(PARQUET_ROWS_PER_BATCH, row_groups=[group], columns=[text_field])
                values = itertools.chain.from_iterable(batch.column(text_field) for batch in batches)
                for number, value in enumerate(values, start=first):
                    yield _read_value(value, f"{name}:{number}", text_field)
            first += metadata.num_rows
    except _PARQUET_ERRORS as error:
        num_lost = last - number - 1
        detail = f"corrupt parquet, {num_lost} rows of which cannot be read: {error}"
        yield Problem(ProblemKind.TRUNCATED_ARCHIVE, name, detail, count=max(1, num_lost))


def _read_value(value: pa.Scalar, where: str, text_field: str) -> Document | Problem:
    try:
        text = value.as_py()
        if isinstance(text, bytes):
            text = text.decode("utf-8")
    except UnicodeDecodeError as error:
        return Problem(ProblemKind.INVALID_UTF8, where, str(error))
    return _check_text(text, where, f"column {text_field!r}")


def _check_row_group(group: pq.RowGroupMetaData, text_field: str, where: str) -> Problem | None:
    """Return the problem of a row group whose text takes too much memory when it is decompressed, or None."""
    chunks = [group.column(number) for number in range(group.num_columns)]
    chunks = [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{text_field}.")]
    num_bytes = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
    num_stored = sum(chunk.total_compressed_size for chunk in chunks)
    if num_bytes <= max(_MAX_PARQUET_BYTES, _MAX_PARQUET_RATIO * num_stored):
        return None
    detail = (
        f"the {group.num_rows} values of a row group take {num_bytes / 2**20:,.0f} MiB when decompressed, of "
        f"{num_stored:,} bytes that are stored; the limit is {_MAX_PARQUET_RATIO} times as much"
    )
    return Problem(ProblemKind.OVERSIZED_RECORD, where, detail, count=max(1, group.num_rows))


# ---- parts -----------------------------------------------------------------------------------------------------------


def list_parts(uri: str, archives: Sequence[Archive], *, part_bytes: int = PART_BYTES) -> list[list[Part]]:
    """Return the parts of each archive, in stored order; only the headers of tars and the footers of Parquet are read.

    A damaged archive is divided up to the damage, which the last part reports when it is read. A part is complete with
    `part_bytes` stored bytes.
    """
    filesystem, _ = resolve_source(uri)
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="parts") as pool:
        return list(pool.map(partial(_divide, filesystem, part_bytes), archives))


def _divide(filesystem: fs.FileSystem, part_bytes: int, archive: Archive) -> list[Part]:
    """Return the parts of one archive."""
    starts: list[int] = [0]
    if archive.num_bytes > part_bytes:
        if archive.format is ArchiveFormat.JSONL:
            starts = [*range(0, archive.num_bytes, part_bytes)]
        elif archive.format is ArchiveFormat.TAR:
            starts = _divide_tar(filesystem, part_bytes, archive)
        elif archive.format is ArchiveFormat.PARQUET:
            starts = list(_divide_parquet(filesystem, part_bytes, archive))
    return [Part(start=start, stop=stop) for start, stop in zip(starts, [*starts[1:], None], strict=True)]


def _divide_tar(filesystem: fs.FileSystem, part_bytes: int, archive: Archive) -> list[int]:
    """Return where the headers lie that parts begin with; the first one is 0.

    A tar is not divided if a name occurs twice (the records of both members are counted on, so that their keys are unique,
    which takes reading them in order), if a global header applies to its members, or if it is compressed.
    """
    names = Counter[str]()
    starts = [0]
    with io.BufferedReader(filesystem.open_input_file(archive.path), _HEADER_BYTES) as file:
        if compression_of(file.read(MAGIC_BYTES)):
            return [0]
        with suppress(tarfile.TarError):  # Reading the last part reports the damage.
            for info, _ in tar_members(file):
                if info.pax_headers:
                    return [0]
                names[info.name] += 1
                if info.offset - starts[-1] >= part_bytes:
                    starts.append(info.offset)
    return starts if len(names) == names.total() else [0]


def _divide_parquet(filesystem: fs.FileSystem, part_bytes: int, archive: Archive) -> Iterator[int]:
    """Yield the numbers of the row groups that parts begin with; the first one is 0."""
    yield 0
    with filesystem.open_input_file(archive.path) as file:
        try:
            metadata = pq.ParquetFile(file).metadata
            num_bytes = 0
            for number in range(metadata.num_row_groups):
                if num_bytes >= part_bytes:
                    yield number
                    num_bytes = 0
                group = metadata.row_group(number)
                num_bytes += sum(group.column(column).total_compressed_size for column in range(group.num_columns))
        except _PARQUET_ERRORS:
            return  # Reading the file reports the damage.
