"""Presets of the experiments on sentence embeddings (DeCLUTR, arXiv 2006.03659), and small twins for two CPU cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jobs.engine.config import OptimizerSection, RunSection, TrackingSection, WorkersSection
from jobs.tasks.presets.twins import named, twins_of
from jobs.tasks.sentence_encoder.config import (
    DocumentSection,
    DocumentTemperatureSection,
    SentenceConfig,
    SentenceEncoderSection,
    SpanValidationSection,
)

Preset = Callable[[], SentenceConfig]

SAMPLE = "data/sample"

# The paper trains for one epoch, with 16 documents per batch, on the documents of OpenWebText with 2 048 tokens or
# more.
_NUM_DOCUMENTS = 495_243
_BATCH_SIZE = 16


def _declutr(name: str, encoder: str, paper: str) -> SentenceConfig:
    num_steps = _NUM_DOCUMENTS // _BATCH_SIZE
    return SentenceConfig(
        run=RunSection(name=name, num_steps=num_steps, checkpoint_every=2_000, log_every=50),
        data=DocumentSection(
            train="data/openwebtext2/train",
            validation="data/openwebtext2/validation",
            # The paper has 512, but special tokens take two of RoBERTa's 512 positions. min_num_tokens is the paper's.
            max_length=510,
            min_num_tokens=2048,
        ),
        model=SentenceEncoderSection(path=encoder),
        optimizer=OptimizerSection(
            batch_size=_BATCH_SIZE,
            learning_rate_base=5e-5,
            learning_rate_tempnet=1e-5,
            weight_decay=0.1,
            beta2=0.999,
            epsilon=1e-6,
            warmup_share=0.1,
            decay="linear",
            max_grad_norm=1.0,
        ),
        workers=WorkersSection(num_workers=4, use_gpu=True, zero_stage=1),
        validation=SpanValidationSection(every=2_000),
        tracking=TrackingSection(experiment="sentences", paper=paper),
    )


def declutr_small() -> SentenceConfig:
    """DeCLUTR on DistilRoBERTa: NT-Xent at τ = 0.05 and MLM, equally weighted (Table 1)."""
    return _declutr("declutr-small", "distilbert/distilroberta-base", "DeCLUTR, Table 1")


def declutr_base() -> SentenceConfig:
    """DeCLUTR on RoBERTa-base, with the same losses as declutr-small (Table 1)."""
    return _declutr("declutr-base", "FacebookAI/roberta-base", "DeCLUTR, Table 1")


def declutr_small_temperature_free() -> SentenceConfig:
    """DeCLUTR-small without a temperature (arXiv 2501.17683)."""
    return _with_loss(DocumentTemperatureSection(loss="temperature_free"), "arXiv 2501.17683")


def declutr_small_tempnet() -> SentenceConfig:
    """DeCLUTR-small with a TempNet and the robust loss."""
    temperature = DocumentTemperatureSection(loss="tempnet", rho=3.0, tau_min=0.01, tau_max=0.3)
    return _with_loss(temperature, "")


def _with_loss(temperature: DocumentTemperatureSection, paper: str) -> SentenceConfig:
    config = declutr_small()
    name = f"{config.run.name}-{temperature.loss.replace('_', '-')}"
    return replace(
        config,
        run=replace(config.run, name=name),
        temperature=temperature,
        tracking=replace(config.tracking, paper=paper),
    )


def small(config: SentenceConfig) -> SentenceConfig:
    """Return the twin of a configuration: a small encoder from scratch on the sample text, with spans of 8 to 32 tokens."""
    return replace(
        config,
        run=replace(config.run, name=f"{config.run.name}-small", num_steps=1500, checkpoint_every=500, log_every=20),
        data=DocumentSection(
            train=f"{SAMPLE}/text/train",
            validation=f"{SAMPLE}/text/validation",
            tokenizer=f"{SAMPLE}/wordpiece",
            min_length=8,
            max_length=32,
            min_num_tokens=96,
        ),
        model=SentenceEncoderSection(hidden_size=128, num_layers=1, num_heads=4, dropout=0.0, attention="eager"),
        optimizer=replace(
            config.optimizer, batch_size=32, learning_rate_base=3e-3, learning_rate_tempnet=1e-3, epsilon=1e-8
        ),
        temperature=replace(config.temperature, num_prototypes=128),
        workers=WorkersSection(num_workers=2, cpus_per_worker=0.5, zero_stage=1),
        validation=SpanValidationSection(every=500, num_documents=128),
    )


_FULL: dict[str, Preset] = {
    "declutr-small": declutr_small,
    "declutr-base": declutr_base,
    "declutr-small-temperature-free": declutr_small_temperature_free,
    "declutr-small-tempnet": declutr_small_tempnet,
}

PRESETS: dict[str, Preset] = named(
    twins_of(_FULL, small, "sample text", aliases={"declutr-base": "declutr-small"}) | _FULL
)
"""Preset name → function that returns its configuration."""
