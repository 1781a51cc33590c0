"""Write a package with a job that does not use Ray, submit it by `jobs.submit`, and wait for what it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support import ROOT

PROBE = '''"""Do what the arguments say, as a job on a cluster would."""

import os
import signal
import sys
import time
from pathlib import Path

from jobs.engine.command_line import run_job


def main(arguments):
    place, deed = Path(arguments[0]), arguments[1]
    number = len(list(place.glob("start-*")))
    print(f"start {number} of {deed}, revision {os.environ.get('TEMPNET_REVISION')}", flush=True)
    (place / f"start-{number}").touch()
    if deed == "fail":
        return 3
    if deed == "wait":
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            time.sleep(300)
        except KeyboardInterrupt:
            print("interrupted by the cluster", flush=True)
            (place / "interrupted").touch()
            raise
    if deed == "die" and number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "outlive" and number == 0:
        time.sleep(300)
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    run_job(main)
'''


def write_probe(directory: Path) -> Path:
    """Write the package `probe` into a new directory and return that."""
    (directory / "probe").mkdir(parents=True)
    (directory / "probe" / "__init__.py").touch()
    (directory / "probe" / "job.py").write_text(PROBE)
    return directory


def submit(head: dict[str, str], directory: Path, place: Path, deed: str, *options: str) -> subprocess.Popen[str]:
    """Start `jobs.submit ray` for the probe; its job works in `place`."""
    place.mkdir(exist_ok=True)
    environment = {name: value for name, value in head.items() if name not in ("RAY_ADDRESS", "DASHBOARD", "HEAD_PID")}
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.submit", "ray", "--address", head["DASHBOARD"], "--working-dir", str(directory),
         *options, "--", "probe.job", str(place), deed],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
