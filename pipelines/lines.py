"""Decompress streams that may be truncated or damaged, and split text into lines: of a stream, a range of bytes, a string.

Every readable byte is yielded before an error says why reading stopped. A line ends at a line feed and nowhere else, not at
U+2028, and a byte order mark at the beginning is no part of the first one. A line belongs to the range in which it begins,
so that adjacent ranges yield every line once.
"""

from __future__ import annotations

import bz2
import codecs
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO, Protocol

import psutil
import zstandard

from pipelines.archives import ArchiveFormat

READ_BYTES = 32 * 2**10
# Of an xz stream. Its highest preset needs 65 MiB.
_MAX_XZ_BYTES = 2**28
# The window of Pushshift's archives, the largest that a 64-bit build of zstandard knows.
_MAX_ZSTD_WINDOW_BYTES = 2**31
# A window that needs no look at the machine's memory. It is what zstandard allows unless asked.
_SMALL_ZSTD_WINDOW_BYTES = 2**27
_MAX_ZSTD_HEADER_BYTES = 18
# What a decoder is given at a time: a kibibyte can hold 32 MiB, as four bytes of zstandard can be 128 KiB. It also bounds how
# much good data in front of the damage is lost, because a decoder that fails returns nothing of what it was given.
_PIECE_BYTES = 2**10
_DECODER_ERRORS = (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError)  # the last, as bz2 calls data not its own

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


class DamagedError(Exception):
    """Raised when a stream cannot be decoded beyond the bytes that were already returned."""


class _Decompressed(io.RawIOBase):
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._rest = self._rest or memoryview(next(self._chunks, b""))
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def open_decompressed(stream: Readable, num_bytes: int, line_format: ArchiveFormat) -> BinaryIO:
    """Return the decompressed bytes of a stream as one that cannot seek; reading it may raise DamagedError.

    `num_bytes` is the expected size of the stream; it is checked for an uncompressed one, as a compressed one marks its end.
    """
    return io.BufferedReader(_Decompressed(_decompress(stream, num_bytes, line_format)), READ_BYTES)


def compression_of(beginning: bytes) -> ArchiveFormat | None:
    """Return the format of compressed lines that a stream with this beginning is in, or None if it is not compressed."""
    return next((line_format for magic, line_format in _MAGIC.items() if beginning.startswith(magic)), None)


def _decompress(stream: Readable, num_bytes: int, line_format: ArchiveFormat) -> Iterator[bytes]:
    if line_format is ArchiveFormat.JSONL:
        num_read = 0
        while chunk := stream.read(READ_BYTES):
            yield chunk
            num_read += len(chunk)
        if num_read < num_bytes:
            raise DamagedError(f"the stream ends after {num_read} of {num_bytes} bytes")
    elif line_format is ArchiveFormat.JSONL_ZST:
        # A quarter of the memory stays free for everything else.
        limit = min(_MAX_ZSTD_WINDOW_BYTES, psutil.virtual_memory().available * 3 // 4)
        decompressor = zstandard.ZstdDecompressor(max_window_size=max(limit, _SMALL_ZSTD_WINDOW_BYTES))
        yield from _decompress_frames(stream, "zstandard", decompressor.decompressobj)
    elif line_format is ArchiveFormat.JSONL_XZ:
        new_xz = partial(lzma.LZMADecompressor, memlimit=_MAX_XZ_BYTES)
        yield from _decompress_frames(stream, "xz", new_xz, READ_BYTES, padding=b"\0")
    elif line_format is ArchiveFormat.JSONL_BZ2:
        yield from _decompress_frames(stream, "bzip2", bz2.BZ2Decompressor, READ_BYTES, padding=b"\0")
    else:
        yield from _decompress_frames(stream, "gzip", partial(zlib.decompressobj, zlib.MAX_WBITS | 16), padding=b"\0")


def _decompress_frames(
    stream: Readable, name: str, new: Callable[[], Any], *max_length: int, padding: bytes = b""
) -> Iterator[bytes]:
    """Decompress one frame after the other: only at the end of a frame may a stream end, or it was truncated."""
    data = stream.read(READ_BYTES)
    if not data:
        raise DamagedError(f"the {name} stream has no header")
    while data:
        decoder, header = new(), b""
        while not decoder.eof:
            piece = b""
            if getattr(decoder, "needs_input", True):
                if not data and not (data := stream.read(READ_BYTES)):
                    raise DamagedError(f"the {name} stream ends early")
                piece, data = data[:_PIECE_BYTES], data[_PIECE_BYTES:]
                header += piece[: _MAX_ZSTD_HEADER_BYTES - len(header)]
            try:
                chunk = decoder.decompress(piece, *max_length)
            except _DECODER_ERRORS as error:
                detail = f"corrupt {name} stream: {error}"
                if isinstance(error, zstandard.ZstdError) and "memory" in str(error):
                    num_mib = zstandard.get_frame_parameters(header).window_size / 2**20
                    detail += f": it needs a window of {num_mib:,.0f} MiB, more than can be given to it"
                    detail += ": compress it again, with --long=27 or less"
                raise DamagedError(detail) from error
            if chunk:
                yield chunk
        data = (decoder.unused_data + data).lstrip(padding)
        while not data and (more := stream.read(READ_BYTES)):
            data = more.lstrip(padding)


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


def split_lines(stream: BinaryIO, start: int = 0, stop: int | None = None) -> Iterator[bytes | None]:
    """Yield each line that is not blank, or None for an oversized one, of those that begin in start … stop−1.

    Without `stop`, lines are read to the end; a stream that ends before it raises DamagedError. Lines stay bytes, so that an
    invalid byte affects only its own line.
    """
    position, line = 0, b"\n"
    if start > 0:  # The first line of the range begins after the first newline from start−1 on.
        position, line = stream.seek(start - 1), b""
    mark, limit = codecs.BOM_UTF8 if start == 0 else b"", MAX_RECORD_BYTES + 2  # with the newline, and a byte too many
    while stop is None or position < stop:
        is_inside = not line.endswith(b"\n")  # within a line that began before the range, or that is oversized
        most = READ_BYTES if is_inside else limit + len(mark)
        line = stream.readline(most)
        position += len(line)
        if stop is not None and position < stop and len(line) < most and not line.endswith(b"\n"):
            raise DamagedError(f"the stream ends after {position} of {stop} bytes")
        if not line:
            return
        if is_inside:
            continue
        content, mark = line.removeprefix(mark), b""
        if len(content.removesuffix(b"\n")) > MAX_RECORD_BYTES:
            yield None
        elif stripped := content.strip():
            yield stripped
