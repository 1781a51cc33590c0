"""Presets of the experiments on sentence embeddings (DeCLUTR, arXiv 2006.03659), and small twins for two CPU cores."""

from __future__ import annotations

from collections.abc import Callable

from jobs.engine.config import OptimizerSection, RunSection, TrackingSection, WorkersSection
from jobs.engine.fields import with_fields
from jobs.tasks.presets import TWO_WORKERS, named, twins_of, variant
from jobs.tasks.sentence_encoder.config import (
    DocumentSection,
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


def declutr_small() -> SentenceConfig:
    """DeCLUTR on DistilRoBERTa: NT-Xent at τ = 0.05 and MLM, equally weighted (Table 1)."""
    return SentenceConfig(
        run=RunSection(
            name="declutr-small", num_steps=_NUM_DOCUMENTS // _BATCH_SIZE, checkpoint_every=2_000, log_every=50
        ),
        data=DocumentSection(
            train="data/openwebtext2/train",
            validation="data/openwebtext2/validation",
            # The paper has 512, but special tokens take two of RoBERTa's 512 positions. min_num_tokens is the paper's.
            max_length=510,
            min_num_tokens=2048,
        ),
        model=SentenceEncoderSection(path="distilbert/distilroberta-base"),
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
        tracking=TrackingSection(experiment="sentences", paper="DeCLUTR, Table 1"),
    )


_FULL: dict[str, Preset] = {
    "declutr-small": declutr_small,
    "declutr-base": variant(
        declutr_small,
        "DeCLUTR on RoBERTa-base, with the same losses as declutr-small (Table 1).",
        {"model.path": "FacebookAI/roberta-base"},
    ),
    "declutr-small-temperature-free": variant(
        declutr_small,
        "DeCLUTR-small without a temperature (arXiv 2501.17683).",
        {"temperature.loss": "temperature_free", "tracking.paper": "arXiv 2501.17683"},
    ),
    "declutr-small-tempnet": variant(
        declutr_small,
        "DeCLUTR-small with a TempNet and the robust loss.",
        {
            "temperature.loss": "tempnet",
            "temperature.rho": 3.0,
            "temperature.tau_min": 0.01,
            "temperature.tau_max": 0.3,
            "tracking.paper": "",
        },
    ),
}


def small(config: SentenceConfig) -> SentenceConfig:
    """Return the twin of a configuration: a small encoder from scratch on the sample text, with spans of 8 to 32 tokens."""
    return with_fields(
        config,
        {
            "run.num_steps": 1500,
            "run.checkpoint_every": 500,
            "run.log_every": 20,
            "data.train": f"{SAMPLE}/text/train",
            "data.validation": f"{SAMPLE}/text/validation",
            "data.tokenizer": f"{SAMPLE}/wordpiece",
            "data.min_length": 8,
            "data.max_length": 32,
            "data.min_num_tokens": 96,
            "model.path": "",
            "model.hidden_size": 128,
            "model.num_layers": 1,
            "model.num_heads": 4,
            "model.dropout": 0.0,
            "model.attention": "eager",
            "optimizer.batch_size": 32,
            "optimizer.learning_rate_base": 3e-3,
            "optimizer.learning_rate_tempnet": 1e-3,
            "optimizer.epsilon": 1e-8,
            "temperature.num_prototypes": 128,
            **TWO_WORKERS,
            "validation.every": 500,
            "validation.num_documents": 128,
        },
    )


PRESETS: dict[str, Preset] = named(
    twins_of(_FULL, small, "sample text", aliases={"declutr-base": "declutr-small"}) | _FULL
)
"""Preset name → function that returns its configuration."""
