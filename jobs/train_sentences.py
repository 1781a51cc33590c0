"""Train a sentence encoder on spans of documents (DeCLUTR) with a contrastive loss and masked language modelling.

For example:

    python -m jobs.train_sentences declutr-small-small
    python -m jobs.train_sentences --help
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import parse_preset, run_job
from jobs.tasks.presets.sentences import PRESETS


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    config, dry_run = parse_preset(PRESETS, arguments, job="train_sentences", purpose=(__doc__ or "").splitlines()[0])
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from jobs.engine.launch import print_where_to_look, run_command
    from jobs.scoring.mlflow_models import record_models
    from jobs.tasks.sentence_encoder.plan import make_plan

    outcome = run_command(config, make_plan, dry_run=dry_run, record_models=record_models)
    if outcome is not None:
        print_where_to_look(outcome, results="curves.png", commands=[])
    return 0


if __name__ == "__main__":
    run_job(main)
