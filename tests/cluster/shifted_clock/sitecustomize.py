"""Shift the wall clock of every Python process that has this directory in its path.

`time.time` and `time.time_ns` return the true time plus the seconds that the file `TEST_CLOCK` holds as a double. The file
is mapped into memory, so that a shift is seen at once and costs nothing. `datetime.now` and programs that are not written
in Python, such as Ray's raylet, keep the true time.
"""

from __future__ import annotations

import mmap
import os
import struct
import time


def shift_clock(path: str) -> None:
    """Replace the functions of `time`."""
    with open(path, "r+b") as file:
        seconds = mmap.mmap(file.fileno(), 8)
    true_time, true_time_ns = time.time, time.time_ns
    time.time = lambda: true_time() + struct.unpack("d", seconds[:])[0]
    time.time_ns = lambda: true_time_ns() + int(struct.unpack("d", seconds[:])[0] * 1e9)


if "TEST_CLOCK" in os.environ:
    shift_clock(os.environ["TEST_CLOCK"])
