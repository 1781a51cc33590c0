"""A training run on two nodes under seeded schedules of faults, beside a run that nothing happens to.

    .venv/bin/python -m benchmarks.faults [--seed 0] [--num-schedules 20]

What can happen, and what the run depends on, is in `tests/cluster/fault_support.py`. Shown are, for every schedule, the steps
and faults, how often the job was started, steps whose loss is missing or recorded twice, steps with another batch, and the
largest difference of a loss. A schedule that does not end is shown with its error.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
from corpus_support import write_corpus
from fault_support import draw, run_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Which schedules to run."""

    seed: int = 0
    """Seed of the first schedule."""
    num_schedules: int = 20
    """Number of schedules."""
    num_faults: int = 3
    """Number of faults in each."""


def main() -> None:
    """Run the schedules, and print a table and how many of them are good."""
    arguments = tyro.cli(Arguments, description=__doc__)
    num_good = 0
    print("| seed | faults | starts | lost | repeated | other batches | largest difference | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        corpus = write_corpus(Path(name) / "corpus")
        for seed in range(arguments.seed, arguments.seed + arguments.num_schedules):
            events, started = draw(seed, arguments.num_faults), time.monotonic()
            faults = ", ".join(f"{fault} at {step}" for step, fault in events)
            try:
                report = run_schedule(events, corpus, Path(name) / f"seed-{seed}")
            except Exception as error:  # one schedule must not hide the others
                print(f"| {seed} | {faults} | {type(error).__name__}: {error} |", flush=True)
                continue
            num_good += report.is_good
            print(
                f"| {seed} | {faults} | {report.num_starts} | {report.lost} | {report.repeated} | {report.other_batches} | "
                f"{report.largest_difference:.1e} | {time.monotonic() - started:.0f} |",
                flush=True,
            )
            for note in report.notes:
                print(f"  {note}", file=sys.stderr, flush=True)
    print(f"{num_good} of {arguments.num_schedules} are good (all were to be)")


if __name__ == "__main__":
    main()
