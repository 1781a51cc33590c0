"""Reproduce a table or figure of the papers: run the trainings it needs, and check its claim against the results.

For example:

    python -m jobs.reproduce T4 --scale small
    python -m jobs.reproduce T4 --scale full --dry-run
    python -m jobs.reproduce papers --output papers.md
    python -m jobs.reproduce --help
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tyro

from jobs.engine.command_line import REFUSED, refusals_on_one_line, run_job
from jobs.studies.reproduction.config import ReproduceConfig
from jobs.studies.reproduction.experiments import EXPERIMENTS, find

if TYPE_CHECKING:
    from jobs.studies.reproduction.papers import PapersConfig


def parse(arguments: Sequence[str]) -> tuple[ReproduceConfig | PapersConfig, bool]:
    """Parse the arguments into a configuration and whether a dry run is wanted; `--help` lists the experiments.

    The word `papers` in the place of an experiment asks for the page of all of them.

    Exits the process with a message on an unknown experiment or field, or if the configuration refuses a value.
    """
    rest = [argument for argument in arguments if argument != "--dry-run"]
    if not rest or rest[0] in ("-h", "--help"):
        width = max(map(len, EXPERIMENTS))
        lines = "\n".join(f"  {name:<{width}}  {one.title}: {one.claim}" for name, one in EXPERIMENTS.items())
        purpose = (__doc__ or "").splitlines()[0]
        print(
            f"{purpose}\n\nusage: python -m jobs.reproduce EXPERIMENT [--scale small|full] [--seeds N] [--dry-run] …\n\n"
            f"experiments (EXPERIMENT --help lists the options):\n{lines}\n\n"
            "python -m jobs.reproduce papers [--output FILE] writes a page of all tables and figures with their verdicts."
        )
        raise SystemExit(0 if rest else REFUSED)
    with refusals_on_one_line():
        if rest[0] == "papers":
            from jobs.studies.reproduction.papers import PapersConfig  # which loads MLflow

            return tyro.cli(PapersConfig, args=rest[1:], prog="python -m jobs.reproduce papers"), False
        _ = find(rest[0])
        config = tyro.cli(ReproduceConfig, args=rest, prog="python -m jobs.reproduce", description=__doc__)
    return config, len(rest) < len(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status: 1 if a run failed."""
    config, dry_run = parse(arguments)
    if not isinstance(config, ReproduceConfig):
        from jobs.studies.reproduction.papers import write_papers

        with refusals_on_one_line():
            print(write_papers(config))
        return 0
    # Imported only now, so that an error in the arguments is reported without waiting for Ray to load.
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from jobs.studies.reproduction.launch import check_reproduction, run_reproduction
    from jobs.studies.reproduction.plan import make_reproduction
    from jobs.studies.trials import run_command

    disable_progress_bar()
    set_verbosity_error()
    return run_command(
        config,
        make_reproduction,
        run_reproduction,
        check_reproduction,
        dry_run=dry_run,
        files="results.md, figures.png and results.json",
    )


if __name__ == "__main__":
    run_job(main)
