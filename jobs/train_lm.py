"""Train a language model and its TempNet: from scratch, fine-tuned, or a TempNet alone on a frozen base.

python -m jobs.train_lm gpt2-scratch-small
python -m jobs.train_lm --help
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs.command_line import fail, parse_preset
from jobs.presets.language_models import PRESETS


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    config, dry_run = parse_preset(PRESETS, arguments, job="train_lm", purpose=(__doc__ or "").splitlines()[0])
    # Imported late: a misspelt preset should not wait for Ray and Transformers.
    from ray.train import TrainingFailedError

    from jobs.training.job import FatalTrainingError
    from jobs.training.launch import make_plan, train
    from jobs.training.report import has_constant_temperature, summary_table
    from pipelines.problems import TooManyProblemsError

    try:
        if dry_run:
            print(make_plan(config).describe())
            return 0
        outcome = train(config)
    except (ValueError, OSError, TooManyProblemsError, FatalTrainingError, TrainingFailedError) as error:
        fail(str(error))
    print(f"\n{summary_table(outcome)}\n")
    print(f"  results   {outcome['directory']}/report (tokens.html shows a passage coloured by τ)")
    print(f"  model     {outcome['export']}\n")
    print("To look around, type:")
    if outcome["tracking_uri"]:
        print(f"  .venv/bin/mlflow server --host 127.0.0.1 --port 5000 --backend-store-uri {outcome['tracking_uri']}")
    print(f"  .venv/bin/python -m jobs.predict_temperatures --model {outcome['export']} --text README.md")
    return 1 if has_constant_temperature(outcome) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
