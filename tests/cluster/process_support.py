"""Runs a program in several processes that begin their work at the same moment."""

from __future__ import annotations

import subprocess
import sys


def run_together(code: str, arguments: list[list[str]], environment: dict[str, str]) -> list[str]:
    """Run a program that says "ready" several times at once, and return what each run prints after it may go on."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for words in arguments
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [process.communicate()[0] for process in processes]
