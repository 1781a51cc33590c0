"""Presets of the experiments on fine-tuning classifiers with TripleEntropy, and small twins for two CPU cores."""

from __future__ import annotations

from collections.abc import Callable

from jobs.engine.config import OptimizerSection, RunSection, TrackingSection, ValidationSection, WorkersSection
from jobs.engine.fields import with_fields
from jobs.tasks.classifier.config import ClassifierModelSection, CrossValidationConfig, LabelledSection
from jobs.tasks.presets import named, twins_of, variant

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


_FULL: dict[str, Preset] = {
    "triple-entropy": triple_entropy,
    "triple-entropy-large": variant(
        triple_entropy,
        "RoBERTa-large with cross-entropy and with the best setting of TripleEntropy, 4 seeds × 5 folds (Table 6).",
        {"model.path": "FacebookAI/roberta-large", "tracking.paper": "TripleEntropy, Table 6"},
    ),
    "triple-entropy-grid": variant(
        triple_entropy,
        "The whole grid of the paper, 4 900 settings × 20 cells per task; narrow it with `--grid.*`.",
        {
            "tracking.paper": "TripleEntropy, the grid of its search",
            "grid.num_centers": (10, 100, 1000, 2000),
            "grid.gamma": (0.01, 0.03, 0.05, 0.07, 0.1),
            "grid.scale": (1.0, 3.0, 3.3, 4.0, 6.0, 8.0, 10.0),
            "grid.margin": (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0),
            "grid.beta": (0.1, 0.3, 0.5, 0.7, 0.9),
        },
    ),
}


def small(config: CrossValidationConfig) -> CrossValidationConfig:
    """Return the twin: the encoder trained by `train_sentences declutr-small-small`, with 100 centres per class."""
    changes = {
        "run.num_steps": 75,
        "data.num_tokens": 32,
        "model.path": "runs/declutr-small-small/export",
        "model.attention": "eager",
        "optimizer.learning_rate_base": 1e-3,
        "optimizer.beta2": 0.999,
        "optimizer.epsilon": 1e-8,
        "workers.cpus_per_worker": 0.9,
        "workers.num_threads": 1,
        "workers.use_gpu": False,
    }
    is_grid = len(config.grid.num_centers) > 1
    return with_fields(config, changes if is_grid else changes | {"grid.num_centers": (100,)})


PRESETS: dict[str, Preset] = named(
    twins_of(_FULL, small, "a small encoder", aliases={"triple-entropy-large": "triple-entropy"}) | _FULL
)
"""Preset name → function that returns its configuration."""
