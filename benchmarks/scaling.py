"""Training throughput of two workers against one, each with one thread, the data pipeline included.

    .venv/bin/python -m benchmarks.scaling [--num-steps 120] [--num-rounds 3]

`gpt2-scratch-small` on the sample data, with the command that a person types and the same global batch. Every round runs one
worker and then two. Speeds are medians of the tokens/s that MLflow holds for every 20 steps, without the first of them;
ratios are taken within a round.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from jobs.engine.metrics import metric_history
from jobs.engine.tracking import TrackedRun

TARGET = 1.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to measure."""

    num_steps: int = 120
    """Number of steps of each run."""
    num_rounds: int = 3
    """Number of rounds."""
    precision: str = "fp32"
    """Precision of both runs."""


def run(num_workers: int, storage: Path, name: str, arguments: Arguments) -> tuple[float, float]:
    """Train with a number of workers; return tokens a second and the share of the time spent waiting for data."""
    command = [
        sys.executable, "-m", "jobs.train_lm", "gpt2-scratch-small", f"--run.storage={storage}", f"--run.name={name}",
        f"--run.num-steps={arguments.num_steps}", "--run.log-every=20", "--run.checkpoint-every=1000000",
        "--validation.every=1000000", f"--workers.num-workers={num_workers}", "--workers.num-threads=1",
        f"--workers.precision={arguments.precision}",
    ]  # fmt: skip
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    outcome = json.loads((storage / name / "outcome.json").read_text())
    tracked = TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"])
    speeds = [speed for _, speed in sorted(metric_history(tracked, "train/tokens_per_second").items())]
    return statistics.median(speeds[1:]), outcome["data_wait_share"]


def main() -> None:
    """Print the speeds of every round, their ratios, and the median ratio beside its target."""
    arguments = tyro.cli(Arguments, description=__doc__)
    print(
        f"torch {torch.__version__}, {os.cpu_count()} CPUs, {platform.processor() or platform.machine()}, {arguments}"
    )
    ratios = []
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        for number in range(arguments.num_rounds):
            (alone, _), (both, wait) = (
                run(workers, Path(name), f"round-{number}-workers-{workers}", arguments) for workers in (1, 2)
            )
            ratios.append(both / alone)
            print(
                f"round {number + 1}: one worker {alone:,.0f} tokens/s, two {both:,.0f}, ratio {ratios[-1]:.3f}; two wait "
                f"{wait:.2%} of the time for data",
                flush=True,
            )
    print(
        f"median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); at least {TARGET:g} was to be"
    )


if __name__ == "__main__":
    main()
