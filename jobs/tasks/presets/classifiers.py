"""Presets of the experiments on fine-tuning classifiers with TripleEntropy, and small twins for two CPU cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jobs.engine.config import OptimizerSection, RunSection, TrackingSection, ValidationSection, WorkersSection
from jobs.tasks.classifier.config import (
    ClassifierModelSection,
    CrossValidationConfig,
    GridSection,
    LabelledSection,
)
from jobs.tasks.presets.twins import named, twins_of

Preset = Callable[[], CrossValidationConfig]

SENTEVAL = "senteval/data/downstream"


def triple_entropy() -> CrossValidationConfig:
    """RoBERTa-base with cross-entropy and with the best setting of TripleEntropy, 4 seeds × 5 folds (Tables 2 to 5)."""
    return CrossValidationConfig(
        run=RunSection(name="triple-entropy", num_steps=125, checkpoint_every=1_000, log_every=10),
        data=LabelledSection(directory=SENTEVAL, num_examples=1_000),
        model=ClassifierModelSection(path="FacebookAI/roberta-base"),
        optimizer=OptimizerSection(
            batch_size=64,
            learning_rate_base=1e-5,
            weight_decay=0.1,
            beta2=0.98,
            epsilon=1e-6,
            warmup_share=0.06,
            decay="linear",
            max_grad_norm=1.0,
        ),
        workers=WorkersSection(num_workers=1, use_gpu=True, zero_stage=0),
        validation=ValidationSection(every=1_000),
        tracking=TrackingSection(experiment="classifiers", paper="TripleEntropy, Tables 2 to 5"),
    )


def triple_entropy_large() -> CrossValidationConfig:
    """RoBERTa-large with cross-entropy and with the best setting of TripleEntropy, 4 seeds × 5 folds (Table 6)."""
    config = triple_entropy()
    return replace(
        config,
        run=replace(config.run, name="triple-entropy-large"),
        model=replace(config.model, path="FacebookAI/roberta-large"),
        tracking=replace(config.tracking, paper="TripleEntropy, Table 6"),
    )


def triple_entropy_grid() -> CrossValidationConfig:
    """The whole grid of the paper, 4 900 settings × 20 cells per task; narrow it with `--grid.*`."""
    config = triple_entropy()
    return replace(
        config,
        run=replace(config.run, name="triple-entropy-grid"),
        tracking=replace(config.tracking, paper="TripleEntropy, the grid of its search"),
        grid=GridSection(
            num_centers=(10, 100, 1000, 2000),
            gamma=(0.01, 0.03, 0.05, 0.07, 0.1),
            scale=(1.0, 3.0, 3.3, 4.0, 6.0, 8.0, 10.0),
            margin=(0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0),
            beta=(0.1, 0.3, 0.5, 0.7, 0.9),
        ),
    )


def small(config: CrossValidationConfig) -> CrossValidationConfig:
    """Return the twin: the encoder trained by `train_sentences declutr-small-small`, with 100 centres per class."""
    grid = config.grid if len(config.grid.num_centers) > 1 else replace(config.grid, num_centers=(100,))
    return replace(
        config,
        run=replace(config.run, name=f"{config.run.name}-small", num_steps=75),
        data=replace(config.data, num_tokens=32),
        model=ClassifierModelSection(path="runs/declutr-small-small/export", attention="eager"),
        grid=grid,
        optimizer=replace(config.optimizer, learning_rate_base=1e-3, beta2=0.999, epsilon=1e-8),
        workers=WorkersSection(num_workers=1, cpus_per_worker=0.9, num_threads=1, zero_stage=0),
    )


_FULL: dict[str, Preset] = {
    "triple-entropy": triple_entropy,
    "triple-entropy-large": triple_entropy_large,
    "triple-entropy-grid": triple_entropy_grid,
}

PRESETS: dict[str, Preset] = named(
    twins_of(_FULL, small, "a small encoder", aliases={"triple-entropy-large": "triple-entropy"}) | _FULL
)
"""Preset name → function that returns its configuration."""
