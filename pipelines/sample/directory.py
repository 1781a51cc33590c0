"""A directory of sample data that appears only when it is complete."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_empty(directory: Path) -> None:
    """Raise FileExistsError if `directory` exists and is not an empty directory."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise FileExistsError(f"directory {str(directory)!r} is not empty; remove it or choose another")


@contextmanager
def created_at_once(directory: Path) -> Iterator[Path]:
    """Yield a staging directory that becomes `directory` by a rename at the end, or is deleted if the block raises."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as temporary:
        # The data are written to a subdirectory, because the temporary directory itself is readable by its owner only.
        staging = Path(temporary, "staging")
        staging.mkdir()
        yield staging
        staging.rename(directory)
