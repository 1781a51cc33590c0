"""Fine-tune sentence classifiers by TripleEntropy and by cross-entropy, cross-validated side by side.

python -m jobs.train_classifier triple-entropy-small --data.directory senteval/data/downstream
python -m jobs.train_classifier --help
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs.command_line import fail, parse_preset
from jobs.presets.classifiers import PRESETS


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status: 1 if a cell failed."""
    config, dry_run = parse_preset(PRESETS, arguments, job="train_classifier", purpose=(__doc__ or "").splitlines()[0])
    # Imported late: a misspelt preset should not wait for Ray and Transformers.
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from jobs.classifiers.cross_validation import cross_validate, make_cross_validation
    from jobs.trials.command import print_results
    from pipelines.problems import TooManyProblemsError

    disable_progress_bar()
    set_verbosity_error()
    try:
        work = make_cross_validation(config)
        if dry_run:
            print(work.describe())
            return 0
        results = cross_validate(work)
    except (ValueError, OSError, TooManyProblemsError) as error:
        fail(str(error))
    return print_results(
        results.table,
        directory=config.run.directory,
        files="results.md and results.json",
        failed=results.failed,
        tracking_uri=results.tracking_uri,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
