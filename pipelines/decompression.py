"""Decompress a stream that may be truncated or damaged: yield every readable byte, then report why reading stopped."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import zstandard

from pipelines.archives import ArchiveFormat

# Size of one read. It also bounds how much good data in front of the damage a *corrupt* stream can lose, because a
# decoder that fails returns nothing of the read in which it failed.
READ_BYTES = 32 * 2**10


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


def decompress(stream: Readable, num_bytes: int, line_format: ArchiveFormat) -> Iterator[bytes]:
    """Yield the decompressed bytes in pieces of at most READ_BYTES.

    Args:
        stream: source of the stored bytes.
        num_bytes: expected size of the stream. It is checked for an uncompressed stream only; a compressed stream
            itself marks where it ends.
        line_format: format of the stream: JSONL, JSONL_ZST or JSONL_GZ.

    Raises:
        DamagedError: where the stream is truncated or cannot be decoded further.
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
                # Use `read1`, because `read` discards what it has already decoded if the stream then proves damaged.
                while chunk := file.read1(READ_BYTES):
                    yield chunk
                    num_chunks += 1
                is_empty = num_chunks == 0 and file.mtime is None  # `mtime` is None as long as no header was read.
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamagedError(f"corrupt gzip stream: {error}") from error
        if is_empty:
            raise DamagedError("the gzip stream has no header")


class _ZstdSource:
    """Pass compressed bytes through unchanged while tracking the Zstandard frames in them (RFC 8878, section 3.1).

    The stream reader of `zstandard` treats the end of its input as the end of the data, even in the middle of a frame.
    Tracking where frames end is therefore the only way to notice that a download was truncated.
    """

    __slots__ = ("_checksum_bytes", "_header", "_in_frame", "_num_frames", "_num_skip", "_stream")

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._header = b""  # The bytes read so far of the next frame or block header.
        self._num_skip = 0  # The number of bytes between the current position and that header.
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
            if magic >> 4 == 0x184D2A5:  # This is a skippable frame; its size follows the magic number.
                if len(header) < 8:
                    return
                self._num_skip = int.from_bytes(header[4:], "little")
            else:  # A wrong magic number is not checked here, because the decompressor reports it.
                descriptor = header[4]
                single_segment = descriptor >> 5 & 1
                size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
                self._num_skip = (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3] + size_bytes
                self._checksum_bytes = 4 * (descriptor >> 2 & 1)
                self._in_frame = True
            self._num_frames += 1
        self._header = b""
