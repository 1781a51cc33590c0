"""The memory of one step, read from Linux."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def peak_growth_of(step: Callable[[], None]) -> int:
    """KiB by which the peak resident size during a step lies above the resident size at its start."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _kib("VmRSS")
    step()
    return _kib("VmHWM") - before


def _kib(field: str) -> int:
    """A field of /proc/self/status: VmRSS, the resident size, or VmHWM, its peak."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))
