"""List runs with their state, step, loss, mean temperature, remaining time and last failure, from storage alone.

For example:

    python -m jobs.runs runs
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from jobs.engine.command_line import ending_in_one_line, parse_options, run_job, show
from jobs.engine.config import RunSection
from jobs.engine.report import markdown_table


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsConfig:
    """Which runs to list, and how."""

    storages: Annotated[tuple[str, ...], tyro.conf.Positional] = field(default=())
    """Directories or URIs that hold runs (--run.storage), or a run's own. If empty: $TEMPNET_HOME, else ./runs."""
    state: tuple[Literal["running", "stalled", "finished", "failed", "interrupted", "lost", "waiting"], ...] = ()
    """Only runs in these states. If empty: all."""
    json: bool = False
    """Print one JSON object per run instead of a table."""


def main(arguments: Sequence[str]) -> int:
    """Print the runs; returns the exit status."""
    config = parse_options(RunsConfig, arguments, job="runs", description=__doc__)
    # Imported only now, so that `--help` is answered without waiting for Ray to load.
    from jobs.engine.run_list import list_runs, table_of

    with ending_in_one_line():
        storages = config.storages or (RunSection(name="any").resolved_storage,)
        found = [run for storage in storages for run in list_runs(storage)]
    shown = [run for run in found if not config.state or run.state in config.state]
    if config.json:
        for run in shown:
            print(json.dumps(dataclasses.asdict(run), ensure_ascii=False))
    elif shown:
        show(markdown_table([[" ".join(cell.split()) for cell in row] for row in table_of(shown)]))
    else:
        states = f", of {len(found)}, is {' or '.join(config.state)}" if found else ""
        print(f"no run in {', '.join(storages)}{states}")
    return 0


if __name__ == "__main__":
    run_job(main)
