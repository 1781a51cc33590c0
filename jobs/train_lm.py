"""Train a language model and its TempNet: from scratch, fine-tuned, or only a TempNet for a frozen base model.

For example:

    python -m jobs.train_lm gpt2-scratch-small
    python -m jobs.train_lm --help
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import parse_preset, run_job
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.presets.language_models import PRESETS


def look_at(config: LanguageModelConfig, export: str) -> list[str]:
    """Return the job and its arguments that show an export's temperatures, or its perplexity if it has no TempNet."""
    if config.temperature.needs_tempnet:
        return ["jobs.predict_temperatures", "--model", export, "--text", "README.md"]
    return ["jobs.evaluate_lm", "--models", export, "--wikitext", "README.md"]


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    config, dry_run = parse_preset(PRESETS, arguments, job="train_lm", purpose=(__doc__ or "").splitlines()[0])
    # Imported only now, so that an error in the arguments is reported without waiting for Ray and Transformers to load.
    from jobs.engine.launch import print_where_to_look, run_command
    from jobs.scoring.mlflow_models import record_models
    from jobs.tasks.language_model.plan import make_plan

    outcome = run_command(config, make_plan, dry_run=dry_run, record_models=record_models)
    if outcome is not None:
        print_where_to_look(
            outcome,
            results="tokens.html shows a passage coloured by τ",
            commands=[look_at(config, outcome["export"])],
        )
    return 0


if __name__ == "__main__":
    run_job(main)
