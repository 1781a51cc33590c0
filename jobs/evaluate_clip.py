r"""Evaluate image-text models side by side: retrieval recall both ways, and zero-shot classification.

python -m jobs.evaluate_clip --models runs/a/export runs/b/export --retrieval flickr=flickr30k \
    --captions flickr=dataset_flickr30k.json --splits flickr=test --zero-shot cifar10=cifar10.tar --templates cifar
"""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from jobs.engine.command_line import FAILED, fail, run_job
from jobs.scoring.dual_encoders.config import EvaluateClipConfig


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    try:
        config = tyro.cli(EvaluateClipConfig, args=arguments, prog="python -m jobs.evaluate_clip", description=__doc__)
    except ValueError as error:
        fail(str(error))
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from transformers.utils.logging import disable_progress_bar

    from jobs.scoring.dual_encoders.launch import evaluate
    from jobs.scoring.dual_encoders.table import markdown
    from jobs.scoring.language_models.errors import EvaluationFailedError
    from pipelines.problems import TooManyProblemsError

    disable_progress_bar()
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
