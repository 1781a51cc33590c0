"""Analyse what temperatures say of texts and captions, along a training, over τ_max and ρ; compare decoders.

For example:

    python -m jobs.analyse subjectivity --model runs/gpt2-scratch-small/export --data subjqa --output runs/subjectivity
    python -m jobs.analyse instructions --model runs/gpt2-scratch-small/export --data alpaca.json --output runs/instructions
    python -m jobs.analyse openness --runs runs/gpt2-scratch-small --output runs/openness
    python -m jobs.analyse tau-max --models runs/gpt2-scratch-small/export --wikitext README.md --output runs/tau-max
    python -m jobs.analyse phase --sweep runs/rho --images IMAGES --label concept_frequency --output runs/phase
    python -m jobs.analyse noise --model runs/clip-short/export --images IMAGES --label concept_frequency --output runs/noise
    python -m jobs.analyse decoders --model runs/gpt2-scratch-small/export --text TEXT --output runs/decoders
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tyro

from jobs.engine.command_line import refusals_on_one_line, run_job
from jobs.scoring.analyses.config import Analysis, Instructions, Noise, Openness, Phase, Subjectivity, TauMax
from jobs.scoring.command import ending_in_one_line
from jobs.scoring.decoders.config import Decoders

CONFIGS: dict[str, Callable[..., Any]] = {
    "subjectivity": Subjectivity,
    "instructions": Instructions,
    "openness": Openness,
    "tau-max": TauMax,
    "phase": Phase,
    "noise": Noise,
    "decoders": Decoders,
}
"""Name of an analysis → its configuration."""


def run_analysis(config: Analysis) -> None:
    """Run or continue an analysis; what it raises is said at the function of its kind.

    Its module is imported only here, so that `--help` and a wrong option are answered at once.
    """
    match config:
        case Subjectivity():
            from jobs.scoring.analyses.texts import analyse, read_subjectivity

            analyse(config, read_subjectivity(config.data, config.by), f"τ by subjectivity of the {config.by}")
        case Instructions():
            from jobs.scoring.analyses.texts import analyse, read_instructions

            analyse(config, read_instructions(config.data, config.num_verbs), "τ by the verb of the instruction")
        case Openness():
            from jobs.scoring.analyses.curves import analyse_openness

            analyse_openness(config)
        case TauMax():
            from jobs.scoring.analyses.curves import analyse_tau_max

            analyse_tau_max(config)
        case Phase():
            from jobs.scoring.analyses.pairs import analyse_phase

            analyse_phase(config)
        case Noise():
            from jobs.scoring.analyses.pairs import analyse_noise

            analyse_noise(config)
        case Decoders():
            from jobs.scoring.decoders.job import compare_decoders

            compare_decoders(config)
        case _:
            raise TypeError(f"there is no analysis for {type(config).__name__}")


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    with refusals_on_one_line():
        config: Analysis = tyro.extras.subcommand_cli_from_dict(
            CONFIGS, args=arguments, prog="python -m jobs.analyse", description=__doc__
        )
    with ending_in_one_line():
        run_analysis(config)
    return 0


if __name__ == "__main__":
    run_job(main)
