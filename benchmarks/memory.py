"""Measuring the memory of one step, from Linux's /proc."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def measure_peak_growth(step: Callable[[], None]) -> int:
    """Run a step, and return by how many KiB its peak resident size exceeds the resident size at its start."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _read_kib("VmRSS")
    step()
    return _read_kib("VmHWM") - before


def _read_kib(field: str) -> int:
    """Return a field of /proc/self/status in KiB: VmRSS is the resident size, VmHWM its peak."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))
