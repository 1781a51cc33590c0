"""Divide text archives into parts that can be prepared independently of each other.

The parts of an archive are decided by its bytes and by PART_BYTES alone, so that prepared data do not depend on how
many tasks prepare them: groups of members of a tar, ranges of lines of a JSON lines file, groups of row groups of a
Parquet file. A compressed JSON lines file is one part, because it can only be decompressed from its beginning.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from pipelines.archives import Archive, ArchiveFormat
from pipelines.parts import WHOLE, Part, divide_tar, make_parts
from pipelines.storage import resolve

PART_BYTES = 8 * 2**20
"""Number of stored bytes that complete a part. An archive that is not larger is one part."""

PARQUET_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)
"""Errors by which a damaged Parquet file shows; the third, because the name of a column may be damaged too."""

_NUM_THREADS = 16


def list_parts(uri: str, archives: Sequence[Archive], *, part_bytes: int = PART_BYTES) -> list[list[Part]]:
    """Return the parts of each archive, in stored order; only the headers of tars and the footers of Parquet are read.

    A damaged archive is divided up to the damage, which the last part reports when it is read.

    Args:
        uri: the URI that the archives were listed from.
        archives: the archives.
        part_bytes: number of stored bytes that complete a part.

    Raises:
        OSError: if an archive cannot be opened, or the filesystem fails.
    """
    filesystem, _ = resolve(uri)
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="parts") as pool:
        return list(pool.map(partial(_divide, filesystem, part_bytes), archives))


def _divide(filesystem: fs.FileSystem, part_bytes: int, archive: Archive) -> list[Part]:
    """Return the parts of one archive."""
    if archive.num_bytes <= part_bytes:
        return [WHOLE]
    if archive.format is ArchiveFormat.JSONL:
        starts: list[int] = [*range(0, archive.num_bytes, part_bytes)]
    elif archive.format is ArchiveFormat.TAR:
        starts = _divide_tar(filesystem, part_bytes, archive)
    elif archive.format is ArchiveFormat.PARQUET:
        starts = list(_divide_parquet(filesystem, part_bytes, archive))
    else:
        return [WHOLE]
    return make_parts(starts)


def _divide_tar(filesystem: fs.FileSystem, part_bytes: int, archive: Archive) -> list[int]:
    """Return where the headers lie that parts begin with; the first one is 0.

    A tar is not divided if a name occurs twice: the records of both members are counted on, so that their keys are
    unique, which takes reading them in order.
    """
    names = Counter[str]()

    def may_begin(info: tarfile.TarInfo) -> bool:
        names[info.name] += 1
        return True

    starts = divide_tar(filesystem, archive.path, part_bytes, may_begin)
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
        except PARQUET_ERRORS:
            return  # Reading the file reports the damage.
