"""Analyse what temperatures say of texts and captions, along a training, over τ_max and ρ; compare decoders.

For example:

    python -m jobs.analyse subjectivity --model runs/gpt2-scratch-small/export --data subjqa --output runs/subjectivity
    python -m jobs.analyse instructions --model runs/gpt2-scratch-small/export --data alpaca.json --output runs/instructions
    python -m jobs.analyse openness --runs runs/gpt2-scratch-small --output runs/openness
    python -m jobs.analyse tau-max --models runs/gpt2-scratch-small/export --wikitext README.md --output runs/tau-max
    python -m jobs.analyse phase --sweep runs/rho --images IMAGES --label concept_frequency --output runs/phase
    python -m jobs.analyse noise --model runs/clip-temperatures/export --images IMAGES --label FIELD --output runs/noise
    python -m jobs.analyse decoders --model runs/gpt2-scratch-small/export --text TEXT --output runs/decoders
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import run_job
from jobs.scoring.analyses.config import Decoders, Instructions, Noise, Openness, Phase, Subjectivity, TauMax
from jobs.scoring.command import run_subcommand

ANALYSES = {
    "subjectivity": (Subjectivity, "jobs.scoring.analyses.texts:analyse_subjectivity"),
    "instructions": (Instructions, "jobs.scoring.analyses.texts:analyse_instructions"),
    "openness": (Openness, "jobs.scoring.analyses.curves:analyse_openness"),
    "tau-max": (TauMax, "jobs.scoring.analyses.curves:analyse_tau_max"),
    "phase": (Phase, "jobs.scoring.analyses.pairs:analyse_phase"),
    "noise": (Noise, "jobs.scoring.analyses.pairs:analyse_noise"),
    "decoders": (Decoders, "jobs.scoring.decoders.job:compare_decoders"),
}
"""Name of an analysis → its configuration, and the function that runs or continues it."""


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    return run_subcommand(arguments, ANALYSES, job="analyse", description=__doc__)


if __name__ == "__main__":
    run_job(main)
