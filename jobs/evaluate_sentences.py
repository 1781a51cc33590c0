"""Evaluate sentence encoders side by side: SentEval's classification tasks, and correlation with human judgements.

python -m jobs.evaluate_sentences --models runs/declutr-small-small/export --data senteval/data/downstream
"""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from jobs.engine.command_line import FAILED, fail, run_job
from jobs.scoring.sentence_encoders.config import EvaluateSentencesConfig


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    try:
        config = tyro.cli(
            EvaluateSentencesConfig, args=arguments, prog="python -m jobs.evaluate_sentences", description=__doc__
        )
    except ValueError as error:
        fail(str(error))
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from jobs.scoring.language_models.errors import EvaluationFailedError
    from jobs.scoring.sentence_encoders.launch import evaluate
    from jobs.scoring.sentence_encoders.table import markdown
    from pipelines.problems import TooManyProblemsError

    disable_progress_bar()
    set_verbosity_error()
    try:
        columns = evaluate(config)
    except (ValueError, OSError, TooManyProblemsError) as error:
        fail(str(error))
    except EvaluationFailedError as error:
        fail(str(error), FAILED)
    print(f"\n{markdown(columns)}\n\n  results   {config.run.directory}/results.md and results.json")
    return 0


if __name__ == "__main__":
    run_job(main)
