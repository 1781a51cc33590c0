"""Measure what a temperature could gain, choose ρ for a base model, or choose τ_max of a trained TempNet.

For example:

    python -m jobs.calibrate headroom --model runs/gpt2-ce-small/export --text data/sample/code
    python -m jobs.calibrate headroom --model runs/clip-cc3m-clip-small/export --images data/sample/images/test
    python -m jobs.calibrate headroom --model gpt2 --prompts questions.jsonl --verifier.name gsm8k
    python -m jobs.calibrate rho --model runs/gpt2-scratch-small/export --text data/sample/text/train
    python -m jobs.calibrate tau-max --model runs/gpt2-scratch-small/export --prompts prompts.txt --mean-tau 0.7
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.engine.command_line import run_job
from jobs.scoring.calibration.config import Rho, TauMax
from jobs.scoring.command import run_subcommand
from jobs.scoring.headroom.config import Headroom, RewardHeadroom


def subcommands(arguments: Sequence[str]) -> dict[str, tuple[type[Any], str]]:
    """Return name → configuration, and the function that runs it."""
    # Options of likelihood and of rewards have little in common, and the verifier tells which are meant.
    is_reward = any(word.startswith("--verifier") for word in arguments)
    headroom = (RewardHeadroom, "jobs.scoring.headroom.rewards:measure_reward_headroom")
    return {
        "headroom": headroom if is_reward else (Headroom, "jobs.scoring.headroom.job:measure_headroom"),
        "rho": (Rho, "jobs.scoring.calibration.rho:calibrate_rho"),
        "tau-max": (TauMax, "jobs.scoring.calibration.tau_max:calibrate_tau_max"),
    }


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    return run_subcommand(arguments, subcommands(arguments), job="calibrate", description=__doc__)


if __name__ == "__main__":
    run_job(main)
