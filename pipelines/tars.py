"""Read tar archives as a stream: yield the members in order, extract nothing to disk, and report damage.

This module follows the headers itself instead of using `tarfile.TarFile`, which loads an extended header of any size
into memory, searches it in quadratic time, recurses into chains of extended headers, and treats a broken header as
the end of the archive. Single header blocks are still parsed by `tarfile.TarInfo.frombuf`. Memory holds one buffer and one
extended header, whatever sizes the archive claims.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from typing import BinaryIO

MAX_HEADER_BYTES = 2**16
"""Maximum size of an extended header (a pax header, or a GNU header for a long name), in bytes.

A longer one is an error, after which the archive cannot be read further. A path on Linux has at most 4 KiB.
"""

_BYTES_SKIPPED = 2**20  # at a time, of a stream that cannot seek
_BLOCK_BYTES = tarfile.BLOCKSIZE
_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_PAX_HEADERS = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)
_TYPES_WITHOUT_DATA = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)
_SPARSE = "GNU.sparse."
_MAX_DIGITS = 20  # Maximum number of digits of a pax record's length and of a member's size.


class TarMember:
    """Reader of the bytes of one member, taken from the archive's stream.

    If the archive ends inside the member, all bytes that exist can be read, and then `is_cut` becomes True.
    """

    __slots__ = ("_num_left", "_source", "is_cut")

    def __init__(self, source: _Source, num_bytes: int) -> None:
        self._source = source
        self._num_left = num_bytes
        self.is_cut = False

    def num_unread(self) -> int:
        """Return how many bytes of the member were not read; 0 where the archive ends inside it."""
        return 0 if self.is_cut else self._num_left

    def read(self, num_bytes: int, /) -> bytes:
        """Return up to `num_bytes` bytes; the result is empty at the end of the member or of the archive."""
        data = self._source.read(min(num_bytes, self._num_left))
        self._num_left -= len(data)
        self.is_cut = not data and self._num_left > 0
        return data


def tar_members(
    stream: BinaryIO, *, start: int = 0, stop: int | None = None
) -> Iterator[tuple[tarfile.TarInfo, TarMember]]:
    """Yield the header and a reader of each member of a tar from `start` on, in order, up to `stop`.

    The tar is read in small pieces, so that it should have a buffer; one that cannot seek is at `start`. A member can only be
    read before the next one is requested. `stop` is where a later header begins: there reading ends without an end mark. The
    valid attributes of a header are `name` (always encodable as UTF-8), `type`, `size`, `offset` (where the member's first
    header begins), `offset_data`, `pax_headers` (the fields of global headers so far), and `sparse` (not None for a sparse
    file, whose stored bytes are not the file's content).
    """
    source = _Source(stream, start)
    for_all: dict[str, str] = {}  # Fields of global pax headers, which apply to all later members.
    for_next: dict[str, str] = {}  # Fields of the extended headers before the next member; the first occurrence wins.
    first = start  # Where the first header of the next member begins.
    while True:
        position = source.position
        if stop is not None and position >= stop:
            return
        block = source.read(_BLOCK_BYTES)
        if not block:
            what = (
                "the archive is empty (0 bytes)" if position == 0 else f"it ends at byte {position} without an end mark"
            )
            raise tarfile.ReadError(what)
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            if not block.strip(b"\0") and len(block) == _BLOCK_BYTES:
                return  # A block of zeros marks the end of the archive.
            raise tarfile.ReadError(
                f"neither a member nor the end of the archive at byte {position}: {error}"
            ) from error
        if info.type in _PAX_HEADERS:
            fields = _pax_fields(_extended_header(info, source, position), position)
            if info.type == tarfile.XGLTYPE:
                for_all |= fields
            else:
                for_next = fields | for_next
        elif info.type in _LONG_NAMES:
            name = _extended_header(info, source, position).split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
            if info.type == tarfile.GNUTYPE_LONGNAME:
                for_next = {"path": name} | for_next
        else:
            num_stored = _complete(info, for_all | for_next, block, source, position)
            for_next = {}
            info.offset, info.pax_headers = first, for_all
            yield info, TarMember(source, num_stored)
            end = info.offset_data + _whole_blocks(num_stored)
            if not source.skip(end - source.position):
                raise tarfile.ReadError(f"it ends within {info.name}")
            first = source.position


def _complete(info: tarfile.TarInfo, fields: dict[str, str], block: bytes, source: _Source, position: int) -> int:
    """Apply the fields of extended headers to a member's header; return the number of bytes stored for the member."""
    if info.type == tarfile.GNUTYPE_SPARSE:
        info.sparse = []  # type: ignore[assignment]  # a list in the code of tarfile, bytes in its stubs
        is_extended = block[482]
        while is_extended:
            block = source.read(_BLOCK_BYTES)
            is_extended = len(block) == _BLOCK_BYTES and block[504]
    elif _SPARSE in fields:
        info.sparse = []  # type: ignore[assignment]
    name = fields.get("path", info.name)
    info.name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if "size" in fields:
        info.size = _number(fields["size"], position)
    if info.size < 0:
        raise tarfile.ReadError(f"the header at byte {position} gives a size of {info.size} bytes")
    info.offset_data = source.position
    return 0 if info.type in _TYPES_WITHOUT_DATA else info.size


def _extended_header(info: tarfile.TarInfo, source: _Source, position: int) -> bytes:
    if not 0 <= info.size <= MAX_HEADER_BYTES:
        raise tarfile.ReadError(
            f"the extended header at byte {position} says that it has {info.size} bytes; the limit is {MAX_HEADER_BYTES}"
        )
    content = source.read(_whole_blocks(info.size))
    if len(content) < _whole_blocks(info.size):
        raise tarfile.ReadError(f"it ends within the extended header at byte {position}")
    return content[: info.size]


def _pax_fields(content: bytes, position: int) -> dict[str, str]:
    """Parse a pax header, a sequence of records `<length> <field>=<value>\\n` (POSIX.1-2008, pax).

    Only the fields `path`, `size` and `GNU.sparse.*` are returned; all sparse fields become a single empty entry. The
    time is linear in the size of the content.
    """
    fields: dict[str, str] = {}
    at = 0
    while at < len(content):
        digits, space, _ = content[at : at + _MAX_DIGITS + 1].partition(b" ")
        length = _number(digits.decode("latin-1"), position) if space else 0
        record = content[at + len(digits) + 1 : at + length]
        field, equals, value = record[:-1].partition(b"=")
        if at + length > len(content) or not (equals and record.endswith(b"\n")):
            raise tarfile.ReadError(f"the pax header at byte {position} is damaged")
        if field in (b"path", b"size"):
            fields[field.decode()] = value.decode("utf-8", "surrogateescape")
        elif field.startswith(_SPARSE.encode()):
            fields[_SPARSE] = ""
        at += length
    return fields


def _number(digits: str, position: int) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS):
        raise tarfile.ReadError(f"{digits[:_MAX_DIGITS]!r} in the pax header at byte {position} is not a number")
    return int(digits)


def member_end(info: tarfile.TarInfo) -> int:
    """Return the position in the tar at which a member's data end, including padding."""
    return info.offset_data + _whole_blocks(info.size)


def num_bytes_behind(end: int, num_bytes: int) -> int:
    """Return how many bytes of a tar lie behind the end of a member; 0 if not even a block does, so that it ends early."""
    num_left = (num_bytes or 0) - end  # Some filesystems do not report sizes.
    return num_left if num_left >= _BLOCK_BYTES else 0


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


class _Source:
    """A stream and the position in it."""

    def __init__(self, stream: BinaryIO, position: int) -> None:
        self._stream, self.position = stream, position
        self._size = stream.seek(0, os.SEEK_END) if stream.seekable() else None
        if self._size is not None:
            stream.seek(position)

    def read(self, num_bytes: int) -> bytes:
        """Return exactly `num_bytes` bytes, or fewer at the end of the stream."""
        data = self._stream.read(num_bytes)
        self.position += len(data)
        return data

    def skip(self, num_bytes: int) -> bool:
        """Skip `num_bytes` bytes; return whether there are so many."""
        if self._size is not None:  # A header may claim more bytes than there are positions to seek.
            num_skipped = min(num_bytes, self._size - self.position)
            self.position = self._stream.seek(self.position + num_skipped)
            return num_skipped == num_bytes
        while num_bytes > 0 and (data := self.read(min(num_bytes, _BYTES_SKIPPED))):
            num_bytes -= len(data)
        return not num_bytes
