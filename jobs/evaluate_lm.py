"""Evaluate language models at several temperatures, side by side: perplexities and tasks of lm-evaluation-harness.

For example:

    python -m jobs.evaluate_lm --models runs/a/export --temperatures one tempnet fixed:0.7 --wikitext wikitext2_valid.txt
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import run_job
from jobs.scoring.command import run_evaluation
from jobs.scoring.language_models.config import EvaluateConfig


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status: 1 if a part of the evaluation failed."""
    return run_evaluation(arguments, EvaluateConfig, job="evaluate_lm", description=__doc__)


if __name__ == "__main__":
    run_job(main)
