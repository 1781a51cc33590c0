"""Test that ranges of files are read in the order in which they are asked for, from a filesystem that is not local."""

from __future__ import annotations

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs

from pipelines.ranges import ByteRange, RangeReader


def test_ranges_of_a_filesystem_that_is_not_local_are_read_in_order() -> None:
    memory = MemoryFileSystem()
    contents = {f"/bucket/{number}": np.random.default_rng(number).bytes(1000) for number in range(3)}
    for path, content in contents.items():
        memory.pipe(path, content)
    reader = RangeReader(fs.PyFileSystem(fs.FSSpecHandler(memory)))
    rng = np.random.default_rng(0)
    ranges = [ByteRange(f"/bucket/{rng.integers(3)}", int(rng.integers(1000)), 50) for _ in range(200)]
    assert (
        list(reader.stream(ranges))
        == reader.read(ranges)
        == [contents[path][at : at + size] for path, at, size in ranges]
    )
    with pytest.raises(FileNotFoundError):
        reader.read([ByteRange("/bucket/9", 0, 1)])
    # A stream reads 64 MiB at a time, so a file that is gone is not noticed before its turn.
    memory.pipe("/bucket/large", bytes(2**26))
    stream = reader.stream([ByteRange("/bucket/large", 0, 2**26), ByteRange("/bucket/9", 0, 1)])
    assert len(next(stream)) == 2**26
    with pytest.raises(FileNotFoundError):
        next(stream)
