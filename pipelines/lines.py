"""Decompress streams that may be truncated or damaged, and split text into lines: of a stream, a range of bytes, a string.

Every readable byte is yielded before an error says why reading stopped. A line ends at a line feed and nowhere else: other
characters that Unicode calls line boundaries, such as U+2028, may stand inside a record. A byte order mark at the beginning
is no part of the first line. A line belongs to the range in which it begins, so that adjacent ranges yield every line once.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import itertools
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import psutil
import zstandard

from pipelines.archives import ArchiveFormat

# Size of one read. It also bounds how much good data in front of the damage a *corrupt* stream can lose, because a
# decoder that fails returns nothing of the read in which it failed.
READ_BYTES = 32 * 2**10
# Of an xz stream. Its highest preset needs 65 MiB.
_MAX_XZ_BYTES = 2**28
# The window of Pushshift's archives, the largest that a 64-bit build of zstandard knows.
_MAX_ZSTD_WINDOW_BYTES = 2**31
# A window that needs no look at the machine's memory. It is what zstandard allows unless asked.
_SMALL_ZSTD_WINDOW_BYTES = 2**27
_MAX_ZSTD_HEADER_BYTES = 18
_ZSTD_PIECE_BYTES = 2**10

_MAGIC = {
    b"\x1f\x8b": ArchiveFormat.JSONL_GZ,
    b"\x28\xb5\x2f\xfd": ArchiveFormat.JSONL_ZST,
    b"\xfd7zXZ\0": ArchiveFormat.JSONL_XZ,
    b"BZh": ArchiveFormat.JSONL_BZ2,
}
MAGIC_BYTES = max(map(len, _MAGIC))
"""Number of bytes at the beginning of a stream by which :func:`compression_of` recognises it."""


class Readable(Protocol):
    """Source of bytes that can be read sequentially."""

    def read(self, num_bytes: int, /) -> bytes: ...


@runtime_checkable
class Seekable(Readable, Protocol):
    """Source of bytes that may also be read from any position."""

    def seekable(self) -> bool: ...

    def seek(self, position: int, whence: int = ..., /) -> int: ...


class DamagedError(Exception):
    """Raised when a stream cannot be decoded beyond the bytes that were already returned."""


class Decompressed:
    """The decompressed bytes of a stream as a stream that cannot seek; reading it may raise DamagedError."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks

    def read(self, num_bytes: int, /) -> bytes:
        """Return the next bytes, up to READ_BYTES whatever was asked for, or nothing at the end."""
        return next(self._chunks, b"")


def compression_of(beginning: bytes) -> ArchiveFormat | None:
    """Return the format of compressed lines that a stream with this beginning is in, or None if it is not compressed."""
    return next((line_format for magic, line_format in _MAGIC.items() if beginning.startswith(magic)), None)


def decompress(stream: Readable, num_bytes: int, line_format: ArchiveFormat) -> Iterator[bytes]:
    """Yield the decompressed bytes in pieces of at most 32 MiB, usually of READ_BYTES or a block.

    `num_bytes` is the expected size of the stream; it is checked for an uncompressed one, as a compressed one marks its end.
    """
    if line_format is ArchiveFormat.JSONL:
        num_read = 0
        while chunk := stream.read(READ_BYTES):
            yield chunk
            num_read += len(chunk)
        if num_read < num_bytes:
            raise DamagedError(f"the stream ends after {num_read} of {num_bytes} bytes")
    elif line_format is ArchiveFormat.JSONL_ZST:
        yield from _decompress_zstd(stream)
    elif line_format is ArchiveFormat.JSONL_XZ:
        yield from _decompress_frames(stream, "xz", lambda: lzma.LZMADecompressor(memlimit=_MAX_XZ_BYTES))
    elif line_format is ArchiveFormat.JSONL_BZ2:
        yield from _decompress_frames(stream, "bzip2", bz2.BZ2Decompressor)
    else:
        num_chunks = 0
        try:
            with gzip.GzipFile(fileobj=stream) as file:  # type: ignore[call-overload]
                # Use `read1`, because `read` discards what it has already decoded if the stream then proves damaged.
                while chunk := file.read1(READ_BYTES):
                    yield chunk
                    num_chunks += 1
                is_empty = num_chunks == 0 and file.mtime is None  # `mtime` is None as long as no header was read.
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamagedError(f"corrupt gzip stream: {error}") from error
        if is_empty:
            raise DamagedError("the gzip stream has no header")


def _decompress_frames(
    stream: Readable, name: str, new: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor]
) -> Iterator[bytes]:
    """Decompress one stream after the other by decoders of the standard library."""
    data, decoder = stream.read(READ_BYTES), new()
    if not data:
        raise DamagedError(f"the {name} stream has no header")
    while data or not decoder.needs_input:
        try:
            chunk = decoder.decompress(data, READ_BYTES)
        except (lzma.LZMAError, OSError) as error:  # The second, as bz2 calls data that are not its own.
            raise DamagedError(f"corrupt {name} stream: {error}") from error
        if chunk:
            yield chunk
        data = b""
        if decoder.eof:
            data, decoder = decoder.unused_data, new()
            while not (data := data.lstrip(b"\0")):  # Zeros may pad an xz stream.
                if not (data := stream.read(READ_BYTES)):
                    return
        elif decoder.needs_input:
            data = stream.read(READ_BYTES)
    raise DamagedError(f"the {name} stream ends early")


def _decompress_zstd(stream: Readable) -> Iterator[bytes]:
    """Decompress one frame after the other: only at the end of a frame may a stream end, or it was truncated."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES)
    data = stream.read(READ_BYTES)
    if not data:
        raise DamagedError("the zstandard stream has no frame")
    while data := data or stream.read(READ_BYTES):
        while len(data) < _MAX_ZSTD_HEADER_BYTES and (more := stream.read(READ_BYTES)):
            data += more
        try:
            check_window(zstandard.get_frame_parameters(data).window_size)
            frame = decompressor.decompressobj()
            while not frame.eof:
                if not data and not (data := stream.read(READ_BYTES)):
                    raise DamagedError("the zstandard stream ends inside a frame")
                # A kibibyte can hold 32 MiB, as four bytes can be a block of 128 KiB.
                if chunk := frame.decompress(data[:_ZSTD_PIECE_BYTES]):
                    yield chunk
                data = frame.unused_data + data[_ZSTD_PIECE_BYTES:]
        except zstandard.ZstdError as error:
            raise DamagedError(f"corrupt zstandard stream: {error}") from error


def check_window(num_bytes: int, available_bytes: int | None = None) -> None:
    """Refuse a window of zstandard that does not fit into memory, of which a quarter stays free for everything else."""
    if num_bytes > _SMALL_ZSTD_WINDOW_BYTES:
        if available_bytes is None:
            available_bytes = psutil.virtual_memory().available
        limit = min(_MAX_ZSTD_WINDOW_BYTES, available_bytes * 3 // 4)
        if num_bytes > limit:
            raise DamagedError(
                f"the zstandard stream needs a window of {num_bytes / 2**20:,.0f} MiB, and no more than "
                f"{limit / 2**20:,.0f} MiB can be given to it: compress it again, with --long=27 or less"
            )


MAX_RECORD_BYTES = 16 * 2**20
"""Maximum size of a record in bytes.

A longer record is treated as a decompression bomb or a file without line breaks, and is lost. The size is checked
before parsing, because parsed JSON takes up to 35 times its size as Python objects (`{"":[{}]}` repeated); with this
limit a reader stays below 1 GB.
"""


def decode(data: bytes) -> str:
    """Decode UTF-8, with or without a byte order mark; raises UnicodeDecodeError."""
    return data.decode("utf-8-sig")


def lines_of(text: str) -> list[str]:
    """Return the lines of a text, without their ends (a line feed, also with a carriage return before it)."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def split_lines(chunks: Iterator[bytes]) -> Iterator[bytes | None]:
    """Split chunks of bytes into lines; yield each line that is not blank, or None for an oversized line.

    Lines stay bytes, so that an invalid byte affects only its own line.
    """
    head = b""
    while len(head) < len(codecs.BOM_UTF8) and (chunk := next(chunks, None)) is not None:
        head += chunk
    chunks = itertools.chain([head.removeprefix(codecs.BOM_UTF8)], chunks)
    parts: list[bytes] = []
    num_bytes = 0  # Length of the line so far; counting continues after `parts` has been discarded for its size.
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


def read_line_range(file: Seekable, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes of the lines that begin in start … stop−1, with start < stop, in pieces of at most READ_BYTES.

    Of a line that is longer than MAX_RECORD_BYTES, as much is yielded as shows that it is.
    """
    position = max(start - 1, 0)
    file.seek(position)

    def read() -> bytes:
        nonlocal position
        chunk = file.read(min(READ_BYTES, stop - position))
        if not chunk:
            raise DamagedError(f"the stream ends after {position} of {stop} bytes")
        position += len(chunk)
        return chunk

    newline, chunk = b"", b""
    while start > 0 and not newline:  # The first line of the range begins after the first newline from start−1 on.
        if position == stop:
            return  # A line that began earlier covers the whole range.
        _, newline, chunk = read().partition(b"\n")
    if position == stop and not chunk:
        return
    yield chunk
    while position < stop:
        yield (chunk := read())
    num_after = 0
    is_complete = chunk.endswith(b"\n")
    while not is_complete and num_after <= MAX_RECORD_BYTES and (chunk := file.read(READ_BYTES)):
        chunk, newline, _ = chunk.partition(b"\n")
        is_complete = bool(newline)
        num_after += len(chunk)
        yield chunk
