"""What all benchmarks share: ratios within a round (README.md says why), memory in a process of its own, jobs, tables."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from jobs.engine.metrics import TrackedRun, metric_history
from jobs.engine.report import markdown_table

Value = TypeVar("Value")


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return value over base for every round."""
    return [value / other for value, other in zip(values, base, strict=True)]


def spread(values: Sequence[float], num_digits: int = 3) -> str:
    """Return the median of the rounds, and the smallest and the largest, as text."""
    median, low, high = (f"{of(values):.{num_digits}f}" for of in (statistics.median, min, max))
    return f"{median} ({low} to {high})"


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown, as benchmarks/README.md holds it."""
    print(f"\n{markdown_table([titles, *rows])}", flush=True)


def print_setting(arguments: Any, *packages: str) -> None:
    """Print the machine, the versions of the packages that are installed, and the arguments of the command line."""
    installed = {
        part.metadata["Name"].lower().replace("_", "-"): part.version for part in importlib.metadata.distributions()
    }
    versions = [f"{name} {installed[name]}" for name in packages if name in installed]
    sizes = [f"{field.name} {getattr(arguments, field.name)}" for field in dataclasses.fields(arguments)]
    print(", ".join((platform.machine(), f"{os.cpu_count()} CPUs", *versions)), "\n" + ", ".join(sizes), flush=True)


def in_new_process(run: Callable[..., Value], *arguments: Any, environment: Mapping[str, str] | None = None) -> Value:
    """Return what a function of a module returns in a new process, which begins with these environment variables."""
    context = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, environment or {}), ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(run, *arguments).result()


# Freed memory goes back to the system at once, so that the peak counts tensors and not what malloc keeps.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def measure_peak_growth(step: Callable[[], object]) -> float:
    """Run a step, and return by how many MiB its peak resident size exceeds the resident size at its start (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _read_mib("VmRSS")
    step()
    return _read_mib("VmHWM") - before


def _read_mib(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field))) / 1024


def train_lm_command(storage: Path, name: str, *options: str) -> list[str]:
    """Return the command that a person types to train `gpt2-scratch-small`."""
    return [
        sys.executable, "-m", "jobs.train_lm", "gpt2-scratch-small", f"--run.storage={storage}", f"--run.name={name}",
        *options,
    ]  # fmt: skip


def job_environment() -> dict[str, str]:
    """Return the environment of a job, which finds the programs that lie beside this Python."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run_train_lm(storage: Path, name: str, *options: str) -> dict[str, Any]:
    """Train `gpt2-scratch-small` by the command that a person types, and return its outcome."""
    command = train_lm_command(storage, name, *options)
    done = subprocess.run(command, capture_output=True, text=True, env=job_environment())
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    outcome: dict[str, Any] = json.loads((storage / name / "outcome.json").read_text())
    return outcome


def tokens_per_second(outcome: Mapping[str, Any]) -> float:
    """Return the median of the tokens a second that MLflow holds of a run, without the first, which warms up."""
    tracked = TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"])
    speeds = [speed for _, speed in sorted(metric_history(tracked, "train/tokens_per_second").items())]
    return statistics.median(speeds[1:])
