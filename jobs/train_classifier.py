"""Fine-tune sentence classifiers with TripleEntropy and with cross-entropy, and compare them by cross-validation.

For example:

    python -m jobs.train_classifier triple-entropy-small --data.directory senteval/data/downstream
    python -m jobs.train_classifier --help
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import parse_preset, run_job
from jobs.tasks.presets.classifiers import PRESETS


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status: 1 if a cell failed."""
    config, dry_run = parse_preset(PRESETS, arguments, job="train_classifier", purpose=(__doc__ or "").splitlines()[0])
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from jobs.studies.cross_validation import check_cross_validation, cross_validate, make_cross_validation
    from jobs.studies.trials import run_command

    disable_progress_bar()
    set_verbosity_error()
    return run_command(
        config,
        make_cross_validation,
        cross_validate,
        check_cross_validation,
        dry_run=dry_run,
        files="results.md and results.json",
    )


if __name__ == "__main__":
    run_job(main)
