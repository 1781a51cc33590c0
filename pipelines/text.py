"""Reading documents out of text archives, record by record.

An archive is one file: JSON lines (plain, gzip or zstandard), a tar of such files (the layout of OpenWebText2), or
Parquet. Real downloads are cut short and hold broken records, so whatever is wrong with the *content* comes out of the
same iterator as a `Problem` and costs as little as it can: a record, or the rest of a damaged stream. What is wrong
with the *request* (no such path, no permission, an unknown suffix) raises.

Nothing is extracted to disk or unpickled, and memory holds one record and one read buffer (for Parquet: one column
chunk's pages), whatever the size of the archive.
"""

from __future__ import annotations

import gzip
import itertools
import json
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from pyarrow import fs

MAX_RECORD_BYTES = 256 * 2**20
"""A longer record is not a document but a decompression bomb, or a file without line ends."""

# Also what a *corrupt* stream can cost before its damage: a decoder that fails gives nothing of the read it was in.
READ_BYTES = 32 * 2**10
PARQUET_ROWS_PER_BATCH = 64
NUM_NAMES_SHOWN = 5
# UnicodeDecodeError: a column's name may be corrupt too.
PARQUET_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)


class ArchiveFormat(StrEnum):
    """How the bytes of an archive, or of a member of a tar, are to be read."""

    JSONL = "jsonl"
    JSONL_GZ = "jsonl.gz"
    JSONL_ZST = "jsonl.zst"
    TAR = "tar"
    PARQUET = "parquet"


SUFFIXES = {
    ".jsonl": ArchiveFormat.JSONL,
    ".jsonl.gz": ArchiveFormat.JSONL_GZ,
    ".jsonl.zst": ArchiveFormat.JSONL_ZST,
    ".tar": ArchiveFormat.TAR,
    ".parquet": ArchiveFormat.PARQUET,
}
"""File suffix -> format. `.jsonl.zst.tar`, the name OpenWebText2 is published under, is a `.tar`."""

MEMBER_SUFFIXES = {
    ".jsonl": ArchiveFormat.JSONL,
    ".jsonl.gz": ArchiveFormat.JSONL_GZ,
    ".zst": ArchiveFormat.JSONL_ZST,
}
"""Suffix of a tar's member -> format. `.zst` covers `.jsonl.zst` and the `1.zst` of lm_dataformat's archives."""


class ProblemKind(StrEnum):
    """Everything that can be wrong with an archive's content."""

    TRUNCATED_ARCHIVE = "truncated_archive"
    """A stream ends early or cannot be decoded further; the records before were yielded."""
    INVALID_UTF8 = "invalid_utf8"
    INVALID_JSON = "invalid_json"
    MISSING_TEXT = "missing_text"
    EMPTY_DOCUMENT = "empty_document"
    OVERSIZED_RECORD = "oversized_record"
    EMPTY_ARCHIVE = "empty_archive"
    UNREADABLE_ARCHIVE = "unreadable_archive"
    """Nothing of the archive can be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """One file of documents."""

    path: str
    """Path within the filesystem of the URI it was listed from."""
    format: ArchiveFormat
    num_bytes: int
    """Size of the file as stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text; never empty, always encodable as UTF-8."""

    key: str
    """`<archive path relative to the URI>[/<member>]:<index of the record>`: unique below the URI, stable over runs."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that is not a document."""

    kind: ProblemKind
    where: str
    """A record as in `Document.key`, or an archive or its member, without an index."""
    detail: str


class _Readable(Protocol):
    def read(self, num_bytes: int, /) -> bytes: ...


class _DamagedError(Exception):
    """A stream that cannot be decoded beyond what it has already given."""


def resolve(uri: str) -> tuple[fs.FileSystem, str]:
    """The filesystem of a URI (`s3://`, `gs://`, `file://`, ...) or local path, and the path within it.

    Raises ValueError for an empty URI, or a scheme that pyarrow does not know.
    """
    if not uri:
        raise ValueError("uri is empty; expected a local path or a URI such as s3://bucket/directory")
    if "://" not in uri:
        return fs.LocalFileSystem(), str(Path(uri).expanduser().absolute())
    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"uri {uri!r} is not understood ({error}); expected a local path or file://, s3://, gs://, hdfs://"
        ) from error
    return filesystem, path.rstrip("/") or path


def list_archives(uri: str) -> list[Archive]:
    """The archives at a URI, by path: the file itself, or all below a directory.

    Below a directory, files with another suffix are passed over, and so is everything whose name, or whose directory's
    name, begins with `.` or `_` (unfinished downloads, markers such as `_SUCCESS`).

    Raises FileNotFoundError if the path does not exist or is a directory without archives, and ValueError if it is a
    file with an unknown suffix.
    """
    filesystem, root = resolve(uri)
    info = filesystem.get_file_info(root)
    legal = ", ".join(SUFFIXES)
    if info.type == fs.FileType.NotFound:
        raise FileNotFoundError(f"uri {uri!r}: no such file or directory")
    if info.type != fs.FileType.Directory:
        archive_format = _format_of(root, SUFFIXES)
        if archive_format is None:
            raise ValueError(f"uri {uri!r}: unknown suffix of file {info.base_name!r}; expected one of {legal}")
        return [Archive(path=root, format=archive_format, num_bytes=info.size)]

    archives, others = [], []
    for file in filesystem.get_file_info(fs.FileSelector(root, recursive=True)):
        name = _relative(file.path, root)
        if file.type == fs.FileType.Directory or any(part.startswith((".", "_")) for part in name.split("/")):
            continue
        archive_format = _format_of(name, SUFFIXES)
        if archive_format is None:
            others.append(name)
        else:
            archives.append(Archive(path=file.path, format=archive_format, num_bytes=file.size))
    if not archives:
        raise FileNotFoundError(f"uri {uri!r}: no file ends in one of {legal}; {_seen(others)}")
    return sorted(archives, key=lambda archive: archive.path)


def read_documents(uri: str, archive: Archive, *, text_field: str = "text") -> Iterator[Document | Problem]:
    """Stream the documents of one archive, in the order they are stored in.

    Args:
        uri: the URI that `archive` was listed from; gives the filesystem, and the directory that keys are relative to.
        archive: one of `list_archives(uri)`.
        text_field: the field of a JSON record, or the column of a Parquet file, that holds the text.

    A record's text is a string, or a list of strings, joined by blank lines as lm_dataformat does; a JSON record may
    also be a bare string. Blank lines are not records.

    Raises OSError, at the first step of the iteration, if the file cannot be opened, and at any step if reading from
    the filesystem fails. Parquet is the exception: its reader reports a failed read and corrupt bytes alike.
    """
    is_empty = True
    for item in _read_archive(uri, archive, text_field):
        is_empty = False
        yield item
    if is_empty:
        where = _relative(archive.path, resolve(uri)[1])
        yield Problem(kind=ProblemKind.EMPTY_ARCHIVE, where=where, detail="the archive holds no record")


def _read_archive(uri: str, archive: Archive, text_field: str) -> Iterator[Document | Problem]:
    filesystem, root = resolve(uri)
    name = _relative(archive.path, root)
    if archive.format is ArchiveFormat.PARQUET:
        with filesystem.open_input_file(archive.path) as file:
            yield from _read_parquet(file, name, text_field)
        return
    # Without `compression=None` pyarrow would itself undo what the suffix suggests.
    with filesystem.open_input_stream(archive.path, compression=None) as stream:
        if archive.format is ArchiveFormat.TAR:
            yield from _read_tar(stream, name, text_field)
        else:
            yield from _read_lines(stream, archive.num_bytes, archive.format, name, text_field, itertools.count())


def _format_of(name: str, suffixes: dict[str, ArchiveFormat]) -> ArchiveFormat | None:
    return next((archive_format for suffix, archive_format in suffixes.items() if name.endswith(suffix)), None)


def _relative(path: str, root: str) -> str:
    """`path` below the directory `root`, or the name of the file when `root` is the file itself."""
    below = PurePosixPath(path)
    return str(below.relative_to(root)) if path != root and below.is_relative_to(root) else below.name


def _seen(names: list[str]) -> str:
    if not names:
        return "there is no other file either"
    more = f" and {len(names) - NUM_NAMES_SHOWN} more" if len(names) > NUM_NAMES_SHOWN else ""
    return f"seen: {', '.join(sorted(names)[:NUM_NAMES_SHOWN])}{more}"


# ---- from a record to a document -------------------------------------------------------------------------------------


def _document_of_line(line: bytes | None, where: str, text_field: str) -> Document | Problem:
    if line is None:
        return _oversized(where)
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Problem(kind=ProblemKind.INVALID_UTF8, where=where, detail=str(error))
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested beyond the parser's depth.
        return Problem(kind=ProblemKind.INVALID_JSON, where=where, detail=str(error))
    if isinstance(record, str):
        return _document_of_value(record, where, "the record")
    if not isinstance(record, dict):
        detail = f"the record is a {type(record).__name__}; expected an object or a string"
        return Problem(kind=ProblemKind.MISSING_TEXT, where=where, detail=detail)
    if text_field not in record:
        detail = f"no field {text_field!r}; the record has {', '.join(map(repr, record)) or 'no fields'}"
        return Problem(kind=ProblemKind.MISSING_TEXT, where=where, detail=detail)
    return _document_of_value(record[text_field], where, f"field {text_field!r}")


def _document_of_value(value: object, where: str, label: str) -> Document | Problem:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = "\n\n".join(value)
    if not isinstance(value, str):
        detail = f"{label} is a {type(value).__name__}; expected a string or a list of strings"
        return Problem(kind=ProblemKind.MISSING_TEXT, where=where, detail=detail)
    if not value.strip():
        return Problem(kind=ProblemKind.EMPTY_DOCUMENT, where=where, detail=f"{label} is empty or only whitespace")
    try:
        num_bytes = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, and no tokenizer takes it.
        return Problem(kind=ProblemKind.INVALID_UTF8, where=where, detail=str(error))
    return _oversized(where) if num_bytes > MAX_RECORD_BYTES else Document(key=where, text=value)


def _oversized(where: str) -> Problem:
    detail = f"the record is longer than {MAX_RECORD_BYTES} bytes"
    return Problem(kind=ProblemKind.OVERSIZED_RECORD, where=where, detail=detail)


# ---- JSON lines ------------------------------------------------------------------------------------------------------


def _read_lines(
    stream: _Readable, num_bytes: int, line_format: ArchiveFormat, name: str, text_field: str, indices: Iterator[int]
) -> Iterator[Document | Problem]:
    try:
        for line in _lines(_decoded(stream, num_bytes, line_format)):
            yield _document_of_line(line, f"{name}:{next(indices)}", text_field)
    except _DamagedError as error:
        yield Problem(kind=ProblemKind.TRUNCATED_ARCHIVE, where=name, detail=str(error))


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes | None]:
    """The lines that are not blank, as bytes so that a bad byte costs its own line only; None for an oversized one."""
    parts: list[bytes] = []
    num_bytes = 0  # Of the line so far; goes on counting after `parts` has been given up.
    for chunk in itertools.chain(chunks, [b"\n"]):
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            if num_bytes + len(end) > MAX_RECORD_BYTES:
                yield None
            elif line := b"".join([*parts, end]).strip():
                yield line
            parts, num_bytes = [], 0
        num_bytes += len(rest)
        if num_bytes <= MAX_RECORD_BYTES:
            parts.append(rest)
        else:
            parts.clear()


def _decoded(stream: _Readable, num_bytes: int, line_format: ArchiveFormat) -> Iterator[bytes]:
    """The decompressed bytes in pieces of at most READ_BYTES. Raises _DamagedError where they cannot go on.

    `num_bytes` is what the stream should have; a compressed stream says itself whether it is complete.
    """
    if line_format is ArchiveFormat.JSONL:
        num_read = 0
        while chunk := stream.read(READ_BYTES):
            yield chunk
            num_read += len(chunk)
        if num_read < num_bytes:
            raise _DamagedError(f"the stream ends after {num_read} of {num_bytes} bytes")
    elif line_format is ArchiveFormat.JSONL_ZST:
        source = _ZstdSource(stream)
        reader = zstandard.ZstdDecompressor().stream_reader(
            source,  # type: ignore[arg-type]
            read_across_frames=True,
            closefd=False,
        )
        try:
            while chunk := reader.read(READ_BYTES):
                yield chunk
        except zstandard.ZstdError as error:
            raise _DamagedError(f"corrupt zstandard stream: {error}") from error
        if not source.at_frame_end:
            raise _DamagedError("the zstandard stream ends inside a frame")
    else:
        num_chunks = 0
        try:
            with gzip.GzipFile(fileobj=stream) as file:  # type: ignore[call-overload]
                # `read1`, because `read` drops what it has already decoded when the stream then turns out damaged.
                while chunk := file.read1(READ_BYTES):
                    yield chunk
                    num_chunks += 1
                is_empty = num_chunks == 0 and file.mtime is None  # No header was read.
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _DamagedError(f"corrupt gzip stream: {error}") from error
        if is_empty:
            raise _DamagedError("the gzip stream has no header")


class _ZstdSource:
    """Passes compressed bytes on and follows the frames in them (RFC 8878, section 3.1).

    The reader of `zstandard` takes the end of its input for the end of the data, even in the middle of a frame; where
    frames end is the only sign that a download was cut short.
    """

    __slots__ = ("_checksum_bytes", "_header", "_in_frame", "_num_frames", "_num_skip", "_stream")

    def __init__(self, stream: _Readable) -> None:
        self._stream = stream
        self._header = b""  # The part seen of the frame or block header that comes next.
        self._num_skip = 0  # Bytes until that header.
        self._in_frame = False
        self._checksum_bytes = 0
        self._num_frames = 0

    @property
    def at_frame_end(self) -> bool:
        return self._num_frames > 0 and not (self._in_frame or self._num_skip or self._header)

    def read(self, num_bytes: int, /) -> bytes:
        data = self._stream.read(num_bytes)
        position = 0
        while position < len(data):
            if self._num_skip:
                step = min(self._num_skip, len(data) - position)
                self._num_skip -= step
                position += step
                continue
            self._header += data[position : position + 1]
            position += 1
            self._parse_header()
        return data

    def _parse_header(self) -> None:
        header = self._header
        if self._in_frame:
            if len(header) < 3:
                return
            block = int.from_bytes(header, "little")
            is_last, is_run, size = block & 1, block >> 1 & 3 == 1, block >> 3
            self._num_skip = (1 if is_run else size) + (self._checksum_bytes if is_last else 0)
            self._in_frame = not is_last
        else:
            if len(header) < 5:
                return
            magic = int.from_bytes(header[:4], "little")
            if magic >> 4 == 0x184D2A5:  # A skippable frame: its size follows.
                if len(header) < 8:
                    return
                self._num_skip = int.from_bytes(header[4:], "little")
            else:  # Any other magic number is left for the decompressor to complain about.
                descriptor = header[4]
                single_segment = descriptor >> 5 & 1
                size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
                self._num_skip = (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3] + size_bytes
                self._checksum_bytes = 4 * (descriptor >> 2 & 1)
                self._in_frame = True
            self._num_frames += 1
        self._header = b""


# ---- tar -------------------------------------------------------------------------------------------------------------


class _TarInfo(tarfile.TarInfo):
    """Remembers, on the TarFile, why there was no next member: TarFile takes a broken header for the end, silently."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:  # type: ignore[override]
        try:
            return super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            tar.end = error  # type: ignore[attr-defined]
            raise


class _TarMember:
    """The bytes of one member, from the archive's stream.

    `TarFile.extractfile` raises at the end of a truncated archive and drops what it had read; this gives all there is.
    """

    __slots__ = ("_num_left", "_stream", "is_cut")

    def __init__(self, stream: _Readable, num_bytes: int) -> None:
        self._stream = stream
        self._num_left = num_bytes
        self.is_cut = False

    def read(self, num_bytes: int, /) -> bytes:
        data = self._stream.read(min(num_bytes, self._num_left))
        self._num_left -= len(data)
        self.is_cut = not data and self._num_left > 0
        return data


def _read_tar(stream: _Readable, name: str, text_field: str) -> Iterator[Document | Problem]:
    # Keys stay unique when a member's name occurs twice: its records are counted on.
    indices: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    others: list[str] = []
    try:
        # "r|" reads forward only, which is all that a stream can do, and undoes no compression.
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_TarInfo) as tar:  # type: ignore[call-overload]
            for info in tar:
                member_format = _format_of(info.name, MEMBER_SUFFIXES) if info.isreg() else None
                if member_format is None:
                    others.append(info.name)
                    continue
                member = _TarMember(tar.fileobj, info.size)
                where = f"{name}/{info.name}"
                yield from _read_lines(member, info.size, member_format, where, text_field, indices[info.name])
                if member.is_cut:  # Reported as the member's damage; the tar cannot go on.
                    return
            if not isinstance(tar.end, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise tarfile.ReadError(f"neither a member nor the end of the archive at byte {tar.offset}: {tar.end}")
    except tarfile.TarError as error:
        yield Problem(kind=ProblemKind.TRUNCATED_ARCHIVE, where=name, detail=f"corrupt tar: {error}")
    else:
        if not indices:
            detail = f"no member ends in one of {', '.join(MEMBER_SUFFIXES)}; {_seen(others)}"
            yield Problem(kind=ProblemKind.EMPTY_ARCHIVE, where=name, detail=detail)


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def _read_parquet(file: pa.NativeFile, name: str, text_field: str) -> Iterator[Document | Problem]:
    try:
        # A buffer size makes the reader stream a column's pages instead of loading all of a row group's.
        table = pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
        columns = table.schema_arrow.names
    except PARQUET_ERRORS as error:
        yield Problem(kind=ProblemKind.UNREADABLE_ARCHIVE, where=name, detail=f"corrupt parquet: {error}")
        return
    if text_field not in columns:
        detail = f"no column {text_field!r}; the file has {', '.join(map(repr, columns)) or 'no columns'}"
        yield Problem(kind=ProblemKind.UNREADABLE_ARCHIVE, where=name, detail=detail)
        return
    indices = itertools.count()
    try:
        for batch in table.iter_batches(batch_size=PARQUET_ROWS_PER_BATCH, columns=[text_field]):
            for value in batch.column(text_field):
                where = f"{name}:{next(indices)}"
                try:
                    text = value.as_py()
                    if isinstance(text, bytes):
                        text = text.decode("utf-8")
                except UnicodeDecodeError as error:
                    yield Problem(kind=ProblemKind.INVALID_UTF8, where=where, detail=str(error))
                else:
                    yield _document_of_value(text, where, f"column {text_field!r}")
    except PARQUET_ERRORS as error:
        yield Problem(kind=ProblemKind.TRUNCATED_ARCHIVE, where=name, detail=f"corrupt parquet: {error}")
