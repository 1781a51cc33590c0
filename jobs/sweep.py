"""Sweep numeric fields of a training job, and find the run whose mean temperature lies in a given band.

For example:

    python -m jobs.sweep gpt2-rho-lr-small
    python -m jobs.sweep --help
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import parse_preset, run_job
from jobs.studies.sweeps.presets import PRESETS


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status: 1 if a trial failed."""
    config, dry_run = parse_preset(PRESETS, arguments, job="sweep", purpose=(__doc__ or "").splitlines()[0])
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from jobs.studies.sweeps.launch import check_sweep, make_sweep, run_sweep
    from jobs.studies.trials import run_command

    return run_command(
        config,
        make_sweep,
        run_sweep,
        check_sweep,
        dry_run=dry_run,
        files="report.html shows the mean temperature over the axes",
    )


if __name__ == "__main__":
    run_job(main)
