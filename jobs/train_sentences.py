"""Train a sentence encoder on spans of documents (DeCLUTR) with a contrastive loss and masked language modelling.

For example:

    python -m jobs.train_sentences declutr-small-small
    python -m jobs.train_sentences --help
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import run_job
from jobs.scoring.command import run_training
from jobs.tasks.presets.sentences import PRESETS


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    return run_training(arguments, PRESETS, job="train_sentences", description=__doc__, results="curves.png")


if __name__ == "__main__":
    run_job(main)
