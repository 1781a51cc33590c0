"""Run the analysis of a configuration."""

from __future__ import annotations

from jobs.scoring.analyses.config import Analysis, Instructions, Noise, Openness, Phase, Subjectivity, TauMax
from jobs.scoring.analyses.groups import analyse
from jobs.scoring.analyses.noise import analyse_noise
from jobs.scoring.analyses.openness import analyse_openness
from jobs.scoring.analyses.phase import analyse_phase
from jobs.scoring.analyses.records import read_instructions, read_subjectivity
from jobs.scoring.analyses.tau_max import analyse_tau_max
from jobs.scoring.decoders.config import Decoders
from jobs.scoring.decoders.job import compare_decoders


def run_analysis(config: Analysis) -> None:
    """Run or continue an analysis; what it raises is said at the function of its kind."""
    match config:
        case Subjectivity():
            analyse(config, read_subjectivity(config.data, config.by), f"τ by subjectivity of the {config.by}")
        case Instructions():
            analyse(config, read_instructions(config.data, config.num_verbs), "τ by the verb of the instruction")
        case Openness():
            analyse_openness(config)
        case TauMax():
            analyse_tau_max(config)
        case Phase():
            analyse_phase(config)
        case Noise():
            analyse_noise(config)
        case Decoders():
            compare_decoders(config)
        case _:
            raise TypeError(f"there is no analysis for {type(config).__name__}")
