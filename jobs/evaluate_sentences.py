"""Evaluate sentence encoders side by side: SentEval's classification tasks, and correlation with human judgements.

For example:

    python -m jobs.evaluate_sentences --models runs/declutr-small-small/export --data senteval/data/downstream
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import run_job
from jobs.scoring.command import run_evaluation
from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status: 1 if a part of the evaluation failed."""
    return run_evaluation(arguments, EvaluateSentencesConfig, job="evaluate_sentences", description=__doc__)


if __name__ == "__main__":
    run_job(main)
