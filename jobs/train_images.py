"""Train an image encoder on pairs of views (SimCLR) with any contrastive loss, and score it by a linear probe.

For example:

    python -m jobs.train_images simclr-cifar10-temperature-free-small
    python -m jobs.train_images --help
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import run_job
from jobs.scoring.command import run_training
from jobs.tasks.presets.images import PRESETS


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    return run_training(arguments, PRESETS, job="train_images", description=__doc__, results="curves.png")


if __name__ == "__main__":
    run_job(main)
