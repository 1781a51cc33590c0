"""Writes an export: first into a local directory, then into the run's storage."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.fs

from pipelines.storage import resolve


@contextmanager
def open_export(uri: str) -> Iterator[Path]:
    """Yield a local directory to write into, whose content is copied to `uri` at the end of the block.

    Files of an earlier export at `uri` are overwritten if they have the same names, and kept otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="tempnet-export-") as name:
        yield Path(name)
        filesystem, path = resolve(uri)
        filesystem.create_dir(path, recursive=True)
        pyarrow.fs.copy_files(name, path, destination_filesystem=filesystem)
