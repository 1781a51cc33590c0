"""The body of a training command: makes a plan, describes or runs it, and prints where the results are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jobs.engine.command_line import FAILED, as_typed, exit_interrupted, fail, show
from jobs.engine.config import TrainingConfig
from jobs.engine.recording import RecordModels
from jobs.engine.task import Plan
from jobs.engine.tracking import where_to_browse

Config = TypeVar("Config", bound=TrainingConfig)


def run_command(
    config: Config, make_plan: Callable[[Config], Plan], *, dry_run: bool, record_models: RecordModels
) -> Mapping[str, Any] | None:
    """Make the plan, then print it (dry run) or run it and print the results.

    Exits the process with a message if the configuration or data are refused, if the run fails, and on Ctrl-C.

    Returns:
        The outcome of the run, or None for a dry run.
    """
    from ray.train.v2.api.exceptions import TrainingFailedError

    from jobs.engine.failures import describe_continuation, describe_failure
    from jobs.engine.job import FatalTrainingError
    from jobs.engine.launch import train
    from jobs.engine.lease import LostRunError
    from jobs.engine.preflight import check_plan
    from pipelines.problems import TooManyProblemsError

    try:
        plan = make_plan(config)
        if dry_run:
            show(plan.describe())
            check_plan(plan)
            return None
        outcome = train(plan, record_models=record_models)
    except (ValueError, OSError, TooManyProblemsError) as error:
        fail(str(error))
    except (FatalTrainingError, LostRunError) as error:
        fail(str(error), FAILED)
    except TrainingFailedError as error:
        # The error holds tracebacks of the workers; what a person needs is the last line.
        fail(f"{error}\n{describe_failure(error)}; {describe_continuation(config.run.directory)}", FAILED)
    except KeyboardInterrupt:
        exit_interrupted(config.run.directory)
    show(f"\n{plan.summary_table(outcome)}\n")
    return outcome


def print_where_to_look(outcome: Mapping[str, Any], *, results: str, commands: Sequence[Sequence[str]]) -> None:
    """Print the last lines of a job: its directories, how to open MLflow, and which commands can follow.

    Args:
        results: the files that are worth opening in the report's directory.
        commands: the commands to suggest, each a job followed by its arguments.
    """
    print(f"  results   {outcome['directory']}/report ({results})")
    print(f"  model     {outcome['export']}\n")
    print("To look around, type:")
    if outcome["tracking_uri"]:
        print(where_to_browse(outcome["tracking_uri"], outcome.get("mlflow_experiment_id")))
    for command in commands:
        print(f"  {as_typed(command)}")
