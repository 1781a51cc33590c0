"""Analyse what temperatures say about texts: by how subjective they are, or by the verb of an instruction.

python -m jobs.analyse subjectivity --model runs/gpt2-scratch-small/export --data subjqa --output runs/subjectivity
python -m jobs.analyse instructions --model runs/gpt2-scratch-small/export --data alpaca.json --output runs/instructions
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tyro

from jobs.engine.command_line import refusals_on_one_line, run_job
from jobs.scoring.analyses.config import Instructions, Subjectivity
from jobs.scoring.command import ending_in_one_line


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    kinds: dict[str, Callable[..., Any]] = {"subjectivity": Subjectivity, "instructions": Instructions}
    with refusals_on_one_line():
        config: Subjectivity | Instructions = tyro.extras.subcommand_cli_from_dict(
            kinds, args=arguments, prog="python -m jobs.analyse", description=__doc__
        )
    # Imported only now, so that `--help` and a wrong option are answered at once.
    from jobs.scoring.analyses.job import analyse
    from jobs.scoring.analyses.records import read_instructions, read_subjectivity

    with ending_in_one_line():
        if isinstance(config, Subjectivity):
            analyse(config, read_subjectivity(config.data, config.by), f"τ by subjectivity of the {config.by}")
        else:
            analyse(config, read_instructions(config.data, config.num_verbs), "τ by the verb of the instruction")
    return 0


if __name__ == "__main__":
    run_job(main)
