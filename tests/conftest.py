"""Set up all tests. Ray reads its settings once, so they are made here, before any test module imports it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from store_support import bucket, s3_server  # noqa: F401 - fixtures of all tests

# No test has a time limit per example, because a busy machine may be slow and no test measures speed.
settings.register_profile("tempnet", deadline=None)
settings.load_profile("tempnet")
# A shell lets the processes of its background ignore Ctrl-C; tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Yield a function that mounts a file system of some megabytes, or skips the test where none can be mounted."""
    at = tmp_path / "disk"

    def mount(megabytes: int) -> Path:
        at.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(at)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
        return at

    yield mount
    if at.is_mount():
        # A process of the test may still use the file system.
        subprocess.run(["umount", "--lazy", str(at)], check=True)
