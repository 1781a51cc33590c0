"""A fixture of the tests of text archives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from text_archive_support import read_file

from pipelines.text.reading import Problem


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., tuple[list[str], list[Problem]]]:
    """Return a function that writes an archive, and returns the texts and the problems that are read from it."""

    def read(name: str, data: bytes, **options: str) -> tuple[list[str], list[Problem]]:
        (tmp_path / name).write_bytes(data)
        documents, problems = read_file(tmp_path / name, **options)
        return [document.text for document in documents], problems

    return read
