"""Ranges of archives that can be prepared independently of each other, each of them by one task.

`pipelines.text.parts` and `pipelines.images.units` say where text and image archives are divided.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pyarrow import fs

from pipelines.object_store import is_local, open_for_reading
from pipelines.tars import BUFFER_BYTES, tar_members

HEADER_BYTES = 2**14
"""Number of bytes to read at a time for the headers of a tar alone: one header, with an extended one of the usual size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Range of an archive; its unit is bytes, or row groups for a Parquet file."""

    start: int = 0
    """Where the part begins: for a tar, a header; in a file of lines, any byte (`pipelines.text.lines`)."""
    stop: int | None = None
    """Where the next part begins. None for the last part, which reports how the archive ends."""

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole archive."""
        return self.start == 0 and self.stop is None


WHOLE = Part()
"""The whole of an archive."""


def make_parts(starts: Sequence[int]) -> list[Part]:
    """Return the parts that begin at these positions, the first of which is 0."""
    return [Part(start=start, stop=stop) for start, stop in zip(starts, [*starts[1:], None], strict=True)]


def divide_tar(
    filesystem: fs.FileSystem,
    path: str,
    part_bytes: int,
    may_begin: Callable[[tarfile.TarInfo], bool],
    *,
    in_blocks: bool = False,
) -> list[int]:
    """Return where the headers lie that the parts of a tar begin with; the first one is 0.

    Only headers are read. A damaged tar is divided up to the damage, and a tar is not divided if a global header
    applies to its members.

    Args:
        filesystem: filesystem of the tar.
        path: path within it.
        part_bytes: number of stored bytes that complete a part.
        may_begin: called with every header in order; returns whether a part may begin with this member.
        in_blocks: whether a remote tar is read in large ranges from its beginning to its end rather than in one request
            for every header. This is quicker if the members are small.

    Raises:
        OSError: if the tar cannot be opened, or the filesystem fails.
    """
    starts = [0]
    reads_blocks = in_blocks and not is_local(filesystem)
    file = open_for_reading(filesystem, path) if reads_blocks else filesystem.open_input_file(path)
    with file, suppress(tarfile.TarError):  # Reading the last part reports the damage.
        for info, _ in tar_members(file, buffer_bytes=BUFFER_BYTES if reads_blocks else HEADER_BYTES):
            if info.pax_headers:
                return [0]
            if may_begin(info) and info.offset - starts[-1] >= part_bytes:
                starts.append(info.offset)
    return starts
