"""A training run on two nodes under seeded schedules of faults, beside a run that nothing happens to.

    .venv/bin/python -m benchmarks.faults [--seed 0] [--num-schedules 20]

What can happen is in `tests/cluster/fault_support.py`, what the run depends on in `fault_site.py`. Shown are, for every
schedule, the faults and the steps at which they happen, how often the job was started, steps whose loss is missing or
recorded twice, steps with another batch, the largest difference of a loss, faults that came too late to disturb the run,
and starts that ended early without words that a person understands. A schedule that does not end is shown with its error;
the last lines of jobs that ended early go to stderr.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
from fault_site import Site, run_site
from fault_support import Reference, draw, run_schedule
from support import write_corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Which schedules to run."""

    seed: int = 0
    """Seed of the first schedule."""
    num_schedules: int = 20
    """Number of schedules."""
    num_faults: int = 3
    """Number of faults in each."""
    num_steps: int = 900
    """Number of steps of every run."""
    seconds_of_trouble: float = 5.0
    """How long a fault lasts that goes away by itself."""


def run_seed(seed: int, num_faults: int, site: Site, reference: Reference) -> bool:
    """Run the schedule of a seed, print its row, and return whether the run was equal to the undisturbed one."""
    schedule, started = draw(seed, site.num_steps, num_faults), time.monotonic()
    row = f"| {seed} | {', '.join(f'{fault} at {step}' for step, fault in schedule)} |"
    try:
        report = run_schedule(schedule, site, reference, f"seed-{seed}")
    except Exception as error:  # one schedule must not hide the others
        print(f"{row} {type(error).__name__}: {error} |", flush=True)
        return False
    print(
        f"{row} {len(report.endings) + 1} | {report.num_lost} | {report.num_repeated} | {report.has_same_batches} | "
        f"{report.largest_difference:.1e} | {report.num_late} | {len(report.unexplained)} | "
        f"{time.monotonic() - started:.0f} |",
        flush=True,
    )
    for ending in report.endings:
        print(f"seed {seed}, {ending.fault}: status {ending.status}: {ending.line}", file=sys.stderr, flush=True)
    for line in report.unexplained:
        print(f"seed {seed}, unexplained: {line}", file=sys.stderr, flush=True)
    return report.is_good


def main(arguments: Arguments) -> None:
    """Run the schedules, and print a table and how many runs were equal to the undisturbed one."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        corpus = write_corpus(Path(name) / "corpus")
        sizes = {"num_steps": arguments.num_steps, "seconds_of_trouble": arguments.seconds_of_trouble}
        with run_site(corpus, Path(name) / "site", **sizes) as site:
            reference = Reference.train(site)
            columns = "starts | lost | repeated | same batches | largest difference | late | unexplained | seconds"
            print(f"| seed | faults | {columns} |\n{'|---' * 10}|")
            seeds = range(arguments.seed, arguments.seed + arguments.num_schedules)
            num_good = sum(run_seed(seed, arguments.num_faults, site, reference) for seed in seeds)
    print(
        f"{num_good} of {arguments.num_schedules} are equal to the undisturbed run, disturbed in time and explained (all "
        "were to be)"
    )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
