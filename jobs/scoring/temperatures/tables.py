"""The files of predicted temperatures: one Parquet file per part, in a directory or at a URI."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType

from pipelines.storage import resolve

SUMMARY_FILE = "_summary.json"
"""Totals over all parts, beside them."""


def part_file(archive: int, part: int) -> str:
    """Returns the file name of a part's table; sorted by name, the tables follow the order of the data."""
    return f"part-{archive:05d}-{part:05d}.parquet"


def existing_parts(output: str) -> frozenset[str]:
    """Returns the names of the parts' files that are in the directory `output`, which must exist."""
    filesystem, path = resolve(output)
    files = filesystem.get_file_info(FileSelector(path))
    return frozenset(
        file.base_name for file in files if file.type == FileType.File and file.base_name.startswith("part-")
    )


def write_part(table: pa.Table, output: str, file: str) -> None:
    """Write a part's file; it gets its final name only when it is complete."""
    filesystem, path = resolve(output)
    # The leading underscore hides a partial file from readers of the directory.
    pq.write_table(table, f"{path}/_{file}.partial", filesystem=filesystem, compression="zstd")
    filesystem.move(f"{path}/_{file}.partial", f"{path}/{file}")
