"""The command line of the evaluations, and how every scoring job ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import tyro

from jobs.engine.command_line import FAILED, fail, refusals_on_one_line
from jobs.scoring.config import EvaluationConfig

Config = TypeVar("Config", bound=EvaluationConfig)


@contextmanager
def ending_in_one_line() -> Iterator[None]:
    """End the job with a message of one line and status 2 if the block refuses something, and status 1 if units fail."""
    from jobs.scoring.units import ScoringFailedError
    from pipelines.problems import TooManyProblemsError

    try:
        yield
    except (ValueError, OSError, TooManyProblemsError) as error:
        fail(str(error))
    except ScoringFailedError as error:
        fail(str(error), FAILED)


def run_evaluation(
    arguments: Sequence[str], config_type: type[Config], launch: str, *, job: str, description: str | None
) -> int:
    """Parse the arguments, run `evaluate` of the module `launch`, and print its table and where the results are.

    Returns:
        the exit status: 1 if units failed.
    """
    with refusals_on_one_line():
        config = tyro.cli(config_type, args=arguments, prog=f"python -m jobs.{job}", description=description)
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from importlib import import_module

    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from jobs.engine.cluster import check_machine
    from jobs.engine.preflight import check_writable
    from jobs.scoring.results import Results
    from jobs.scoring.units import ScoringFailedError
    from pipelines.problems import TooManyProblemsError

    disable_progress_bar()
    set_verbosity_error()
    evaluate: Callable[[Config], Results] = import_module(launch).evaluate
    results = f"\n\n  results   {config.run.directory}/results.md and results.json"
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
    except (ValueError, OSError, TooManyProblemsError) as error:
        fail(str(error))
    print(f"\n{table}{results}")
    return 0
