"""Writing an export: into a local directory first, then to where the run's storage is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.fs
from pipelines.storage import resolve


@contextmanager
def exported(uri: str) -> Iterator[Path]:
    """A directory to write into; what it holds in the end goes to `uri`, over what an earlier export left there."""
    with tempfile.TemporaryDirectory(prefix="tempnet-export-") as name:
        yield Path(name)
        filesystem, path = resolve(uri)
        filesystem.create_dir(path, recursive=True)
        pyarrow.fs.copy_files(name, path, destination_filesystem=filesystem)
