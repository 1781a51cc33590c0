r"""Evaluate image-text models side by side: retrieval recall both ways, and zero-shot classification.

For example:

    python -m jobs.evaluate_clip --models runs/a/export runs/b/export --retrieval flickr=flickr30k \
    --captions flickr=dataset_flickr30k.json --splits flickr=test --zero-shot cifar10=cifar10.tar --templates cifar
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import run_job
from jobs.scoring.command import run_evaluation
from jobs.scoring.dual_encoders.config import EvaluateClipConfig


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status: 1 if a part of the evaluation failed."""
    return run_evaluation(arguments, EvaluateClipConfig, job="evaluate_clip", description=__doc__)


if __name__ == "__main__":
    run_job(main)
