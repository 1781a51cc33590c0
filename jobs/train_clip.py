"""Train a dual encoder with personalised temperatures: every loss of the family, from scratch, pretrained or frozen.

python -m jobs.train_clip clip-cc3m-tempnet-small
python -m jobs.train_clip --help
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.command_line import parse_preset, run_job
from jobs.presets.clip import PRESETS


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    config, dry_run = parse_preset(PRESETS, arguments, job="train_clip", purpose=(__doc__ or "").splitlines()[0])
    # Imported late: a misspelt preset should not wait for Ray and Transformers.
    from jobs.clip.plan import make_plan
    from jobs.training.command import print_where_to_look, run_command

    outcome = run_command(config, make_plan, dry_run=dry_run)
    if outcome is not None:
        print_where_to_look(
            outcome,
            results="curves.png, histogram.png",
            commands=[
                f"jobs.evaluate_clip --models {outcome['export']} --retrieval validation={config.data.validation}"
            ],
        )
    return 0


if __name__ == "__main__":
    run_job(main)
