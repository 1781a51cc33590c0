"""Evaluate language models at several temperatures, side by side: perplexities and tasks of lm-evaluation-harness.

python -m jobs.evaluate_lm --models runs/a/export --temperatures one tempnet fixed:0.7 --wikitext wikitext2_valid.txt
"""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from jobs.engine.command_line import FAILED, fail, run_job
from jobs.scoring.language_models.config import EvaluateConfig


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status: 1 if a task failed."""
    try:
        config = tyro.cli(EvaluateConfig, args=arguments, prog="python -m jobs.evaluate_lm", description=__doc__)
        # Imported only now, so that an error in the arguments is reported without waiting for Ray to load.
        from jobs.scoring.language_models.errors import EvaluationFailedError
        from jobs.scoring.language_models.launch import evaluate
        from jobs.scoring.language_models.table import markdown
    except ValueError as error:
        fail(str(error))
    try:
        columns = evaluate(config)
    except EvaluationFailedError as error:
        _show(error.table, config)
        for line in str(error).splitlines():
            print(f"  FAILED    {line}")
        print("\nThe same command, started again, runs only what failed.")
        return FAILED
    except (ValueError, OSError) as error:
        fail(str(error))
    _show(markdown(columns), config)
    return 0


def _show(table: str, config: EvaluateConfig) -> None:
    print(f"\n{table}\n\n  results   {config.run.directory}/results.md and results.json")


if __name__ == "__main__":
    run_job(main)
