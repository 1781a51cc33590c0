"""Train a dual encoder (image and text) with any of the contrastive losses, from scratch, pretrained or frozen.

For example:

    python -m jobs.train_clip clip-cc3m-tempnet-small
    python -m jobs.train_clip --help
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import run_job
from jobs.scoring.command import run_training
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.presets.clip import PRESETS


def evaluation_of(config: ClipConfig, export: str) -> list[str]:
    """Return the job and its arguments that evaluate an export on the run's validation images, read as in the run."""
    data = config.data
    arguments = ["--models", export, "--retrieval", f"validation={data.validation}"]
    if data.validation_captions:
        arguments += ["--captions", f"validation={data.validation_captions}"]
    if data.validation_splits:
        arguments += ["--splits", f"validation={','.join(data.validation_splits)}"]
    return ["jobs.evaluate_clip", *arguments, "--max-bad-share", f"{data.max_bad_share:g}"]


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    return run_training(
        arguments,
        PRESETS,
        job="train_clip",
        description=__doc__,
        results="curves.png, histogram.png",
        commands=lambda config, export: [evaluation_of(config, export)],
    )


if __name__ == "__main__":
    run_job(main)
