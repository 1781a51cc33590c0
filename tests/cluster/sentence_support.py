"""Provide what the tests of training sentence encoders share: a tiny run, and the values that it has logged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from support import tiny_run

from jobs.engine.metrics import TrackedRun, metric_history
from jobs.tasks.presets.sentences import PRESETS
from jobs.tasks.sentence_encoder.config import DocumentTemperatureSection, SentenceConfig

NUM_STEPS = 40


def tiny_sentences(
    corpus: Path, wordpiece: Path, storage: Path, name: str, **sections: dict[str, Any]
) -> SentenceConfig:
    """Return a run of 40 steps of a small RoBERTa with TempNet, with two workers, ZeRO 1 and float32.

    `sections` maps the name of a section to the fields to override in it.
    """
    config = PRESETS["declutr-small-small"]()
    config = replace(
        config,
        run=tiny_run(corpus, storage, name, num_steps=NUM_STEPS, checkpoint_every=5, log_every=5, max_restarts=0),
        data=replace(
            config.data,
            train=str(corpus / "train"),
            validation=str(corpus / "validation"),
            tokenizer=str(wordpiece),
            min_length=3,
            max_length=12,
            min_num_tokens=36,
        ),
        model=replace(config.model, hidden_size=16, num_layers=1, num_heads=2),
        temperature=DocumentTemperatureSection(
            loss="tempnet", rho=1.0, hidden_size=8, num_prototypes=8, tau_min=0.01, tau_max=0.5
        ),
        # With a smaller epsilon, Adam would make full-sized steps of gradients that are only rounding errors.
        optimizer=replace(
            config.optimizer, batch_size=8, learning_rate_base=3e-3, learning_rate_tempnet=1e-2, epsilon=1e-4
        ),
        workers=replace(config.workers, precision="fp32", num_threads=1),
        validation=replace(config.validation, every=20, num_documents=15, batch_size=4),
    )
    return replace(
        config, **{section: replace(getattr(config, section), **values) for section, values in sections.items()}
    )


def history(outcome: dict[str, Any], key: str) -> dict[int, float]:
    return metric_history(TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"]), key)
