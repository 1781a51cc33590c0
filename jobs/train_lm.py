"""Train a language model and its TempNet: from scratch, fine-tuned, or only a TempNet for a frozen base model.

For example:

    python -m jobs.train_lm gpt2-scratch-small
    python -m jobs.train_lm --help
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.command_line import run_job
from jobs.scoring.command import run_training
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.presets.language_models import PRESETS


def look_at(config: LanguageModelConfig, export: str) -> list[str]:
    """Return the job and its arguments that show an export's temperatures, or its perplexity if it has no TempNet."""
    if config.temperature.needs_tempnet:
        return ["jobs.predict_temperatures", "--model", export, "--text", "README.md"]
    return ["jobs.evaluate_lm", "--models", export, "--wikitext", "README.md"]


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns the exit status."""
    return run_training(
        arguments,
        PRESETS,
        job="train_lm",
        description=__doc__,
        results="tokens.html shows a passage coloured by τ",
        commands=lambda config, export: [look_at(config, export)],
    )


if __name__ == "__main__":
    run_job(main)
