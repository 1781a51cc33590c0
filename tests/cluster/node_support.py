"""Run Ray nodes as processes of their own, for tests that end them like machines that lose their power."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent


class Node:
    """A Ray node on this machine with a session directory of its own.

    Args:
        options: options of `ray start` that say whether it is a head.
        num_cpus: number of its logical CPUs.
        environment: environment variables of its processes.
    """

    def __init__(self, *options: str, num_cpus: int, environment: Mapping[str, str]) -> None:
        command = [
            str(BIN / "ray"), "start", *options, "--block", f"--num-cpus={num_cpus}", "--disable-usage-stats",
            f"--temp-dir={tempfile.mkdtemp(prefix='ray-')}",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def processes(self, pattern: str = "") -> list[psutil.Process]:
        """Return its processes whose command begins with a text."""
        found = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid)
            for process in [*family.children(recursive=True), family]:
                with suppress(psutil.NoSuchProcess):
                    if "".join(process.cmdline()[:1]).startswith(pattern):
                        found.append(process)
        return found

    def kill(self, pattern: str = "") -> int:
        """Send SIGKILL to its processes whose command begins with a text, and return their number; "": to all.

        With all of them it is a machine that loses its power.
        """
        processes = self.processes(pattern)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if not pattern:
            self.process.wait()
        return len(processes)
