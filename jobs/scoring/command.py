"""The bodies of commands: of trainings, of evaluations and of jobs with subcommands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

import tyro

from jobs.engine.command_line import FAILED, ending_in_one_line, parse_options, parse_preset, refusals_on_one_line
from jobs.scoring.config import EvaluationConfig

Config = TypeVar("Config", bound=EvaluationConfig)


def run_training(
    arguments: Sequence[str],
    presets: Mapping[str, Callable[[], Any]],
    *,
    job: str,
    description: str | None,
    results: str,
    commands: Callable[[Any, str], list[list[str]]] = lambda config, export: [],
) -> int:
    """Parse the arguments, plan or train, and print where the results are."""
    config, dry_run = parse_preset(presets, arguments, job=job, purpose=(description or "").splitlines()[0])
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from jobs.engine.launch import print_where_to_look, run_command
    from jobs.scoring.mlflow_models import record_models

    outcome = run_command(config, dry_run=dry_run, record_models=record_models)
    if outcome is not None:
        print_where_to_look(outcome, results=f"report ({results})", commands=commands(config, outcome["export"]))
    return 0


def parse_subcommand(
    arguments: Sequence[str], jobs: Mapping[str, tuple[type[Any], str]], *, job: str, description: str | None
) -> Any:
    """Return the configuration that the arguments give for one of the subcommands (see :func:`run_subcommand`)."""
    with refusals_on_one_line():
        return tyro.extras.subcommand_cli_from_dict(
            {name: kind for name, (kind, _) in jobs.items()},
            args=arguments,
            prog=f"python -m jobs.{job}",
            description=description,
        )


def run_subcommand(
    arguments: Sequence[str], jobs: Mapping[str, tuple[type[Any], str]], *, job: str, description: str | None
) -> int:
    """Parse a subcommand and run its function; `jobs` maps names to configuration and MODULE:FUNCTION.

    The module is imported only now, so that `--help` and a wrong option are answered at once.
    """
    config = parse_subcommand(arguments, jobs, job=job, description=description)
    module, _, function = next(place for kind, place in jobs.values() if type(config) is kind).partition(":")
    with ending_in_one_line():
        getattr(import_module(module), function)(config)
    return 0


def run_evaluation(arguments: Sequence[str], config_type: type[Config], *, job: str, description: str | None) -> int:
    """Parse the arguments, run `evaluate` of the module beside the configuration's, and print its table and its place."""
    config = parse_options(config_type, arguments, job=job, description=description)
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from jobs.engine.cluster import check_machine
    from jobs.engine.launch import check_writable
    from jobs.scoring.results import Results
    from jobs.scoring.units import ScoringFailedError

    disable_progress_bar()
    set_verbosity_error()
    package = config_type.__module__.rpartition(".")[0]
    evaluate: Callable[[Config], Results] = import_module(f"{package}.evaluate").evaluate
    results = f"\n\n  results   {config.run.directory}/results.md and results.json"
    with ending_in_one_line():
        try:
            check_writable("storage", config.run.directory)
            check_machine()
            table = evaluate(config).table
        except ScoringFailedError as error:
            print(f"\n{error.table}{results}")
            for line in str(error).splitlines():
                print(f"  FAILED    {line}")
            print("\nThe same command, started again, runs only what failed.")
            return FAILED
    print(f"\n{table}{results}")
    return 0
