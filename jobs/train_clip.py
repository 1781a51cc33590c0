"""Train a dual encoder (image and text) with any of the contrastive losses, from scratch, pretrained or frozen.

For example:

    python -m jobs.train_clip clip-cc3m-tempnet-small
    python -m jobs.train_clip --help
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import parse_preset, run_job
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
    config, dry_run = parse_preset(PRESETS, arguments, job="train_clip", purpose=(__doc__ or "").splitlines()[0])
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from jobs.engine.launch import print_where_to_look, run_command
    from jobs.scoring.mlflow_models import record_models
    from jobs.tasks.dual_encoder.plan import make_plan

    outcome = run_command(config, make_plan, dry_run=dry_run, record_models=record_models)
    if outcome is not None:
        print_where_to_look(
            outcome,
            results="curves.png, histogram.png",
            commands=[evaluation_of(config, outcome["export"])],
        )
    return 0


if __name__ == "__main__":
    run_job(main)
