"""The command of a job that makes many runs: what it will do, what came of it, and where to look."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from jobs.engine.command_line import FAILED, fail, interrupted
from jobs.engine.launch import Named
from jobs.engine.tracking import where_to_browse

Config = TypeVar("Config", bound=Named)
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Generic[Row]):
    """What came of many runs."""

    rows: Sequence[Row]
    table: str
    failed: Mapping[str, str]
    """Name of a trial → its error."""
    directory: str
    tracking_uri: str
    """Empty: nothing was tracked."""


class Work(Protocol):
    """What a configuration comes to, known before anything starts."""

    def describe(self) -> str:
        """For a person."""
        ...


AnyWork = TypeVar("AnyWork", bound=Work)


def run_command(
    config: Config,
    make: Callable[[Config], AnyWork],
    run: Callable[[AnyWork], Results[Row]],
    *,
    dry_run: bool,
    files: str,
) -> int:
    """Make the work; print it, or run it and print the results; returns the exit status: 1 if a trial failed.

    Exits with a message on whatever is refused, and on Ctrl-C.

    Args:
        files: what is worth opening in the directory.
    """
    from pipelines.problems import TooManyProblemsError

    try:
        work = make(config)
        if dry_run:
            print(work.describe())
            return 0
        results = run(work)
    except (ValueError, OSError, TooManyProblemsError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        interrupted(config.run.directory)
    print(f"\n{results.table}\n\n  results   {results.directory} ({files})")
    for name, reason in results.failed.items():
        print(f"  FAILED    {name}: {reason}")
    if results.tracking_uri:
        print("\nTo look around, type:")
        print(f"  {where_to_browse(results.tracking_uri)}")
    return FAILED if results.failed else 0
