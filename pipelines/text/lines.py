"""Split text into lines: a stream of bytes, a range of bytes of a file, or a text that is in memory.

A line ends at a line feed and nowhere else: other characters that Unicode calls line boundaries, such as U+2028, may stand
inside a record. A byte order mark at the beginning is no part of the first line.

A line belongs to the range in which it begins. Reading adjacent ranges therefore yields every line exactly once,
wherever the file was divided.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator

from pipelines.decompression import READ_BYTES, DamagedError, Seekable

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
    """Yield the bytes of the lines that begin in start … stop−1, in pieces of at most READ_BYTES.

    Of a line that is longer than MAX_RECORD_BYTES, as much is yielded as shows that it is.

    Args:
        file: file of lines.
        start, stop: range of bytes within the file, with start < stop.

    Raises:
        DamagedError: if the file ends before `stop`.
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
