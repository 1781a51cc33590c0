"""Measure what a temperature could gain, choose ρ for a base model, or choose τ_max of a trained TempNet.

For example:

    python -m jobs.calibrate headroom --model runs/gpt2-scratch-small/export --text data/sample/text/validation
    python -m jobs.calibrate headroom --model runs/clip-cc3m-clip-small/export --images data/sample/images/test
    python -m jobs.calibrate rho --model runs/gpt2-scratch-small/export --text data/sample/text/train
    python -m jobs.calibrate tau-max --model runs/gpt2-scratch-small/export --prompts prompts.txt --mean-tau 0.7
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tyro

from jobs.engine.command_line import refusals_on_one_line, run_job
from jobs.scoring.calibration.config import Rho, TauMax
from jobs.scoring.command import ending_in_one_line
from jobs.scoring.headroom.config import Headroom


def calibrate(job: Headroom | Rho | TauMax) -> None:
    """Run a subcommand. Its module is imported only here, so that `--help` and a wrong option are answered at once."""
    if isinstance(job, Headroom):
        from jobs.scoring.headroom.job import measure_headroom

        measure_headroom(job)
    elif isinstance(job, Rho):
        from jobs.scoring.calibration.rho import calibrate_rho

        calibrate_rho(job)
    else:
        from jobs.scoring.calibration.tau_max import calibrate_tau_max

        calibrate_tau_max(job)


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    jobs: dict[str, Callable[..., Any]] = {"headroom": Headroom, "rho": Rho, "tau-max": TauMax}
    with refusals_on_one_line():
        job = tyro.extras.subcommand_cli_from_dict(
            jobs, args=arguments, prog="python -m jobs.calibrate", description=__doc__
        )
    with ending_in_one_line():
        calibrate(job)
    return 0


if __name__ == "__main__":
    run_job(main)
