"""The command line of a job that makes many runs: shows the plan, or runs it and says where the results are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from jobs.engine.command_line import FAILED, exit_interrupted, fail, show
from jobs.engine.preflight import Named
from jobs.engine.tracking import where_to_browse

Config = TypeVar("Config", bound=Named)
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Generic[Row]):
    """The results of many runs."""

    rows: Sequence[Row]
    table: str
    failed: Mapping[str, str]
    """Name of a failed trial → its error."""
    directory: str
    tracking_uri: str
    """URI of the MLflow store; empty if nothing was tracked."""
    experiment_id: str
    """MLflow's ID of the experiment; empty if nothing was tracked."""


class Work(Protocol):
    """The plan that a configuration leads to, known before anything starts."""

    def describe(self) -> str:
        """Returns the plan as text for the terminal."""
        ...


AnyWork = TypeVar("AnyWork", bound=Work)


def run_command(
    config: Config,
    make: Callable[[Config], AnyWork],
    run: Callable[[AnyWork], Results[Row]],
    check: Callable[[AnyWork], object],
    *,
    dry_run: bool,
    files: str,
) -> int:
    """Make the plan, and either print it or run it and print the results; returns the exit status, 1 if a trial failed.

    Exits with a message if the configuration is refused, and on Ctrl-C.

    Args:
        config: the configuration of the job.
        make: checks the configuration and returns the plan.
        run: runs the plan.
        check: refuses what `run` refuses before it starts Ray.
        dry_run: only print the plan.
        files: names of the files in the results directory to point the user to.
    """
    from pipelines.problems import TooManyProblemsError

    try:
        work = make(config)
        if dry_run:
            show(work.describe())
            check(work)
            return 0
        results = run(work)
    except (ValueError, OSError, TooManyProblemsError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        exit_interrupted(config.run.directory)
    print(f"\n{results.table}\n\n  results   {results.directory} ({files})")
    for name, reason in results.failed.items():
        show(f"  FAILED    {name}: {reason}")
    if results.tracking_uri:
        print("\nTo look around, type:")
        print(where_to_browse(results.tracking_uri, results.experiment_id))
    return FAILED if results.failed else 0
