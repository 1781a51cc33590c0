"""Run a frozen base model over a text once and store its hidden states, from which TempNets then train without it.

python -m jobs.prepare_features frozen-small --model.path runs/gpt2-scratch-small/export
python -m jobs.prepare_features --help
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import FAILED, exit_interrupted, fail, parse_preset, run_job
from jobs.tasks.presets.language_models import PRESETS


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status: 1 if a file could not be made."""
    config, dry_run = parse_preset(PRESETS, arguments, job="prepare_features", purpose=(__doc__ or "").splitlines()[0])
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from jobs.scoring.features.hidden_states import prepare_hidden_states
    from jobs.scoring.stages import ScoringFailedError
    from jobs.tasks.language_model.plan import make_plan
    from pipelines.problems import TooManyProblemsError

    try:
        plan = make_plan(config)
        if dry_run:
            print(plan.describe())
            return 0
        found = prepare_hidden_states(config)
    except (ValueError, OSError, TooManyProblemsError) as error:
        fail(str(error))
    except ScoringFailedError as error:
        fail(str(error), FAILED)
    except KeyboardInterrupt:
        exit_interrupted(config.run.prepared_directory)
    for features in found:
        print(f"{features.directory}  {features.describe_size()}")
    print("\nTo train on them, add --model.features to the same options of jobs.train_lm")
    return 0


if __name__ == "__main__":
    run_job(main)
