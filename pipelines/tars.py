"""Tar archives as a stream: the members in order, nothing extracted, and damage reported instead of passed over."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

from pipelines.decompression import Readable

_BUFFER_BYTES = 1 << 20


class TarMember:
    """The bytes of one member, from the archive's stream.

    `TarFile.extractfile` raises at the end of a truncated archive and drops what it had read; this gives all there is.
    """

    __slots__ = ("_num_left", "_stream", "is_cut")

    def __init__(self, stream: Readable, num_bytes: int) -> None:
        self._stream = stream
        self._num_left = num_bytes
        self.is_cut = False

    def read(self, num_bytes: int, /) -> bytes:
        """Up to so many bytes; nothing at the end of the member, or of the archive."""
        data = self._stream.read(min(num_bytes, self._num_left))
        self._num_left -= len(data)
        self.is_cut = not data and self._num_left > 0
        return data


def tar_members(stream: Readable) -> Iterator[tuple[tarfile.TarInfo, TarMember]]:
    """The members of a tar, in order; each is to be read, if at all, before the next.

    Raises:
        tarfile.TarError: where the archive is cut or corrupt, after all members before.
    """
    # "r|" reads forward only, which is all that a stream can do, and undoes no compression.
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_BUFFER_BYTES, tarinfo=_TarInfo) as tar:  # type: ignore[call-overload]
        for info in tar:
            yield info, TarMember(tar.fileobj, info.size)
            tar.members.clear()  # else every header stays in memory
        if not isinstance(tar.end, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"neither a member nor the end of the archive at byte {tar.offset}: {tar.end}")


class _TarInfo(tarfile.TarInfo):
    """Remembers, on the TarFile, why there was no next member: TarFile takes a broken header for the end, silently."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:  # type: ignore[override]
        try:
            return super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            tar.end = error  # type: ignore[attr-defined]
            raise
