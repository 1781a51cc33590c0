"""The command of a training job: a preset, a plan, a run, and where to look afterwards."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jobs.engine.command_line import FAILED, fail, interrupted
from jobs.engine.config import TrainingConfig
from jobs.engine.recording import RecordModels
from jobs.engine.task import Plan
from jobs.engine.tracking import where_to_browse

Config = TypeVar("Config", bound=TrainingConfig)


def run_command(
    config: Config, make_plan: Callable[[Config], Plan], *, dry_run: bool, record_models: RecordModels
) -> Mapping[str, Any] | None:
    """Make the plan; print it, or run it and print the results; returns the outcome, or None for a dry run.

    Exits with a message on whatever is refused, on a run that failed, and on Ctrl-C.
    """
    from pipelines.problems import TooManyProblemsError
    from ray.train import TrainingFailedError

    from jobs.engine.job import FatalTrainingError
    from jobs.engine.launch import train

    try:
        plan = make_plan(config)
        if dry_run:
            print(plan.describe())
            return None
        outcome = train(plan, record_models=record_models)
    except (ValueError, OSError, TooManyProblemsError) as error:
        fail(str(error))
    except (FatalTrainingError, TrainingFailedError) as error:
        fail(str(error), FAILED)
    except KeyboardInterrupt:
        interrupted(config.run.directory)
    print(f"\n{plan.summary_table(outcome)}\n")
    return outcome


def print_where_to_look(outcome: Mapping[str, Any], *, results: str, commands: Sequence[Sequence[str]]) -> None:
    """The last lines of a job: its directories, MLflow, and what can be typed next.

    Args:
        results: what is worth opening in the report's directory.
        commands: for each, a job and its arguments.
    """
    print(f"  results   {outcome['directory']}/report ({results})")
    print(f"  model     {outcome['export']}\n")
    print("To look around, type:")
    if outcome["tracking_uri"]:
        print(f"  {where_to_browse(outcome['tracking_uri'])}")
    for command in commands:
        print(f"  .venv/bin/python -m {shlex.join(command)}")
