"""Decompressing a stream that may be cut short or damaged: all that is there, then why it does not go on."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import Protocol

import zstandard

from pipelines.archives import ArchiveFormat

# Also what a *corrupt* stream can cost before its damage: a decoder that fails gives nothing of the read it was in.
READ_BYTES = 32 * 2**10


class Readable(Protocol):
    """A source of bytes."""

    def read(self, num_bytes: int, /) -> bytes: ...


class DamagedError(Exception):
    """A stream that cannot be decoded beyond what it has already given."""


def decoded(stream: Readable, num_bytes: int, line_format: ArchiveFormat) -> Iterator[bytes]:
    """The decompressed bytes in pieces of at most READ_BYTES. Raises DamagedError where they cannot go on.

    `num_bytes` is what the stream should have; a compressed stream says itself whether it is complete.
    """
    if line_format is ArchiveFormat.JSONL:
        num_read = 0
        while chunk := stream.read(READ_BYTES):
            yield chunk
            num_read += len(chunk)
        if num_read < num_bytes:
            raise DamagedError(f"the stream ends after {num_read} of {num_bytes} bytes")
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
            raise DamagedError(f"corrupt zstandard stream: {error}") from error
        if not source.at_frame_end:
            raise DamagedError("the zstandard stream ends inside a frame")
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
            raise DamagedError(f"corrupt gzip stream: {error}") from error
        if is_empty:
            raise DamagedError("the gzip stream has no header")


class _ZstdSource:
    """Passes compressed bytes on and follows the frames in them (RFC 8878, section 3.1).

    The reader of `zstandard` takes the end of its input for the end of the data, even in the middle of a frame; where
    frames end is the only sign that a download was cut short.
    """

    __slots__ = ("_checksum_bytes", "_header", "_in_frame", "_num_frames", "_num_skip", "_stream")

    def __init__(self, stream: Readable) -> None:
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
