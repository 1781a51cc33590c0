"""What spans teach a sentence encoder, at small scale: several settings and seeds, with intervals, in one table.

    .venv/bin/python -m benchmarks.sentence_claims --senteval DIR [--settings start mlm declutr] [--seeds 0 1 2]
        [--train TEXT --validation TEXT --tokenizer BERT]

Every row is `declutr-small-small` of `jobs.train_sentences` with something changed: `start` is its encoder before training,
`mlm` learns by masked tokens alone, `declutr` has two anchors and positives of any kind. Figures are the mean accuracy of
`jobs.evaluate_sentences` over the tasks in DIR; a run or a cell that is finished is not run again. Intervals are 95 % by
Student's t over the seeds; differences to `declutr` are taken seed by seed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import tyro
from transformers import PreTrainedModel

from benchmarks.intervals import interval
from jobs.cluster import start_ray
from jobs.evaluation.config import EvaluationWorkersSection
from jobs.presets.sentences import PRESETS
from jobs.sentence_evaluation.config import EvaluateSentencesConfig
from jobs.sentence_evaluation.launch import evaluate
from jobs.sentences.config import ObjectiveSection, SentenceConfig
from jobs.sentences.models import build_encoder
from jobs.sentences.plan import make_plan
from jobs.training.config import TrackingSection
from jobs.training.launch import train
from pipelines.tokenization import load_tokenizer
from tempnet.models.sentence_encoder import SentenceEncoder

REFERENCE = "declutr"


def _data(**changes: Any) -> Callable[[SentenceConfig], SentenceConfig]:
    return lambda config: replace(config, data=replace(config.data, **changes))


def _same(config: SentenceConfig) -> SentenceConfig:
    return config


SETTINGS: dict[str, tuple[str, Callable[[SentenceConfig], SentenceConfig]]] = {
    "start": ("declutr-small-small", _same),
    "mlm": (
        "declutr-small-small",
        lambda config: replace(config, objective=ObjectiveSection(contrastive_weight=0.0)),
    ),
    REFERENCE: ("declutr-small-small", _same),
    "contrastive-alone": (
        "declutr-small-small",
        lambda config: replace(config, objective=ObjectiveSection(mlm_weight=0.0)),
    ),
    "one-anchor": ("declutr-small-small", _data(num_anchors=1)),
    "subsuming": ("declutr-small-small", _data(strategy="subsuming")),
    "adjacent": ("declutr-small-small", _data(strategy="adjacent")),
    "tempnet": ("declutr-small-tempnet-small", _same),
    "temperature-free": ("declutr-small-temperature-free-small", _same),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to run."""

    senteval: str
    """A directory in SentEval's layout."""
    tasks: tuple[str, ...] = ()
    """Empty: those that are there."""
    settings: tuple[str, ...] = tuple(SETTINGS)
    seeds: tuple[int, ...] = (0, 1, 2)
    num_steps: int | None = None
    """None: the preset's."""
    train: str = ""
    """Training text. Empty: the sample text."""
    validation: str = ""
    tokenizer: str = ""
    num_workers: int = 2
    """Of every run; the result does not depend on it."""
    num_threads: int = 0
    """Of every worker. 0: as `jobs.train_sentences` chooses."""
    num_folds: int = 10
    """Of the evaluation."""
    num_inner_folds: int = 5
    storage: str = "runs/sentence-claims"

    def __post_init__(self) -> None:
        if unknown := [name for name in self.settings if name not in SETTINGS]:
            raise ValueError(f"settings: {unknown[0]!r} is unknown: choose of {', '.join(SETTINGS)}")


def configuration(arguments: Arguments, setting: str, seed: int) -> SentenceConfig:
    """The run of one cell."""
    preset, change = SETTINGS[setting]
    config = change(PRESETS[preset]())
    num_steps = arguments.num_steps or config.run.num_steps
    named = {
        name: getattr(arguments, name) for name in ("train", "validation", "tokenizer") if getattr(arguments, name)
    }
    return replace(
        config,
        run=replace(
            config.run,
            name=f"{setting}-seed{seed}",
            storage=arguments.storage,
            seed=seed,
            num_steps=num_steps,
            checkpoint_every=num_steps,
        ),
        # The same documents for all: with one anchor shorter ones would do.
        data=replace(config.data, **named),
        workers=replace(config.workers, num_workers=arguments.num_workers, num_threads=arguments.num_threads),
        tracking=TrackingSection(enabled=False),
    )


def encoder_of(config: SentenceConfig, setting: str) -> str:
    """A directory with the encoder of one cell, trained unless it is there already."""
    if setting != "start":
        return str(train(make_plan(config))["export"])
    directory = Path(config.run.resolved_storage, config.run.name)
    if not (directory / "model.safetensors").is_file():
        tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
        encoder = SentenceEncoder(cast(PreTrainedModel, build_encoder(config, tokenizer).base_model))
        encoder.save_pretrained(directory, tokenizer, num_tokens=config.data.max_length + 2)
    return str(directory)


def main(arguments: Arguments) -> None:
    """Run, or find, every cell, and print a row for every setting."""
    start_ray()
    accuracies: dict[str, dict[int, float]] = {}
    for setting in arguments.settings:
        accuracies[setting] = {}
        for seed in arguments.seeds:
            encoder = encoder_of(configuration(arguments, setting, seed), setting)
            (column,) = evaluate(
                EvaluateSentencesConfig(
                    models=(encoder,),
                    data=arguments.senteval,
                    tasks=arguments.tasks,
                    num_folds=arguments.num_folds,
                    num_inner_folds=arguments.num_inner_folds,
                    name=f"{setting}-seed{seed}-evaluation",
                    storage=arguments.storage,
                    workers=EvaluationWorkersSection(num_workers=arguments.num_workers),
                    tracking=TrackingSection(enabled=False),
                )
            )
            assert column.mean_accuracy is not None
            accuracies[setting][seed] = 100 * column.mean_accuracy
        print(f"\n{setting}: {interval(list(accuracies[setting].values()))}\n", flush=True)
    reference = accuracies.get(REFERENCE, {})
    print("\n| setting | mean accuracy, % | by seed | against declutr |\n|---|---|---|---|")
    for setting, by_seed in accuracies.items():
        shown = ", ".join(f"{value:.1f}" for value in by_seed.values())
        difference = ""
        if reference and setting != REFERENCE:
            difference = interval([value - reference[seed] for seed, value in by_seed.items()])
        print(f"| {setting} | {interval(list(by_seed.values()))} | {shown} | {difference} |")


if __name__ == "__main__":
    try:
        chosen = tyro.cli(Arguments, description=__doc__)
    except ValueError as error:
        sys.exit(f"error: {error}")
    main(chosen)
