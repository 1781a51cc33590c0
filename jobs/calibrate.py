"""Measure what a temperature could gain, choose ρ for a base model, or choose τ_max of a trained TempNet.

For example:

    python -m jobs.calibrate headroom --model runs/gpt2-ce-small/export --text data/sample/code
    python -m jobs.calibrate headroom --model runs/clip-cc3m-clip-small/export --images data/sample/images/test
    python -m jobs.calibrate headroom --model gpt2 --prompts questions.jsonl --verifier.name gsm8k
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
from jobs.scoring.headroom.config import Headroom, RewardHeadroom


def calibrate(job: Headroom | RewardHeadroom | Rho | TauMax) -> None:
    """Run a subcommand. Its module is imported only here, so that `--help` and a wrong option are answered at once."""
    if isinstance(job, Headroom):
        from jobs.scoring.headroom.job import measure_headroom

        measure_headroom(job)
    elif isinstance(job, RewardHeadroom):
        from jobs.scoring.headroom.rewards import measure_reward_headroom

        measure_reward_headroom(job)
    elif isinstance(job, Rho):
        from jobs.scoring.calibration.rho import calibrate_rho

        calibrate_rho(job)
    else:
        from jobs.scoring.calibration.tau_max import calibrate_tau_max

        calibrate_tau_max(job)


def parse(arguments: Sequence[str]) -> Headroom | RewardHeadroom | Rho | TauMax:
    """Return the configuration of the subcommand."""
    # Options of likelihood and of rewards have little in common, and the verifier tells which are meant.
    headroom = RewardHeadroom if any(word.startswith("--verifier") for word in arguments) else Headroom
    jobs: dict[str, Callable[..., Any]] = {"headroom": headroom, "rho": Rho, "tau-max": TauMax}
    with refusals_on_one_line():
        job: Headroom | RewardHeadroom | Rho | TauMax = tyro.extras.subcommand_cli_from_dict(
            jobs, args=arguments, prog="python -m jobs.calibrate", description=__doc__
        )
    return job


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    job = parse(arguments)
    with ending_in_one_line():
        calibrate(job)
    return 0


if __name__ == "__main__":
    run_job(main)
