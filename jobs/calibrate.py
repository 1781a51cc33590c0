"""Choose ρ for a base model before training, or τ_max of a trained TempNet for generation.

python -m jobs.calibrate rho --model runs/gpt2-scratch-small/export --text data/sample/text/train
python -m jobs.calibrate tau-max --model runs/gpt2-scratch-small/export --prompts prompts.txt --mean-tau 0.7
"""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from jobs.engine.command_line import fail, refusals_on_one_line, run_job
from jobs.scoring.calibration.config import Rho, TauMax


def calibrate(job: Rho | TauMax) -> None:
    """Run a subcommand. Its module is imported only here, so that `--help` and a wrong option are answered at once."""
    if isinstance(job, Rho):
        from jobs.scoring.calibration.rho import calibrate_rho

        calibrate_rho(job)
    else:
        from jobs.scoring.calibration.tau_max import calibrate_tau_max

        calibrate_tau_max(job)


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    with refusals_on_one_line():
        job = tyro.extras.subcommand_cli_from_dict(
            {"rho": Rho, "tau-max": TauMax}, args=arguments, prog="python -m jobs.calibrate", description=__doc__
        )
    try:
        calibrate(job)
    except (ValueError, OSError) as error:
        fail(str(error))
    return 0


if __name__ == "__main__":
    run_job(main)
