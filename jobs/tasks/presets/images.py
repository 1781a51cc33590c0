"""Presets of self-supervised training on images (SimCLR, arXiv 2002.05709), and small twins for two CPU cores."""

from __future__ import annotations

from collections.abc import Callable

from jobs.engine.config import OptimizerSection, RunSection, TrackingSection, WorkersSection
from jobs.engine.fields import with_fields
from jobs.tasks.config import UnimodalSection
from jobs.tasks.image_encoder.config import ImageEncoderConfig, ImageEncoderSection, LabelledImageSection, ProbeSection
from jobs.tasks.presets import TWO_WORKERS, named, twins_of, variant
from jobs.tasks.presets.clip import SAMPLE_IMAGES

Preset = Callable[[], ImageEncoderConfig]

_NUM_IMAGES = 50_000
_BATCH_SIZE = 512
_NUM_EPOCHS = 200


def simclr_cifar10() -> ImageEncoderConfig:
    """SimCLR: NT-Xent at τ = 0.5, a ResNet and a linear probe (SimCLR Appendix B.9)."""
    return ImageEncoderConfig(
        run=RunSection(
            name="simclr-cifar10",
            num_steps=_NUM_EPOCHS * _NUM_IMAGES // _BATCH_SIZE,
            checkpoint_every=2_000,
            log_every=50,
        ),
        data=LabelledImageSection(
            train="data/cifar10/train", validation="data/cifar10/test", min_crop_scale=0.08, num_readers=4
        ),
        # ResNet-18. The stem of Transformers' ResNet reduces images to a quarter: of 32 pixels 8 would be left.
        model=ImageEncoderSection(
            image_size=64,
            embedding_size=128,
            image_widths=(64, 128, 256, 512),
            image_depths=(2, 2, 2, 2),
            image_block="basic",
        ),
        temperature=UnimodalSection(loss="clip_fixed", tau=0.5),
        optimizer=OptimizerSection(
            batch_size=_BATCH_SIZE,
            learning_rate_base=1e-3,
            learning_rate_tempnet=1e-4,
            weight_decay=1e-2,
            beta2=0.999,
            warmup_share=0.05,
        ),
        workers=WorkersSection(num_workers=1, use_gpu=True, zero_stage=0),
        validation=ProbeSection(every=2_000),
        tracking=TrackingSection(experiment="images", paper="SimCLR, Appendix B.9"),
    )


_FULL: dict[str, Preset] = {
    "simclr-cifar10": simclr_cifar10,
    "simclr-cifar10-temperature-free": variant(
        simclr_cifar10,
        "SimCLR without a temperature: logits 2·artanh(cosine) (arXiv 2501.17683).",
        {"temperature.loss": "temperature_free", "temperature.tau": None, "tracking.paper": "arXiv 2501.17683"},
    ),
    "simclr-cifar10-tempnet": variant(
        simclr_cifar10,
        "SimCLR with a TempNet and the robust loss.",
        {
            "temperature.loss": "tempnet",
            "temperature.tau": None,
            "temperature.tau_min": 0.05,
            "temperature.tau_max": 1.0,
            "temperature.rho": 1.0,
            "tracking.paper": "",
        },
    ),
}


def small(config: ImageEncoderConfig) -> ImageEncoderConfig:
    """Return the twin of a configuration: a small ResNet on the sample images, whose concepts are the classes."""
    return with_fields(
        config,
        {
            "run.num_steps": 600,
            "run.checkpoint_every": 300,
            "run.log_every": 20,
            "data.train": f"{SAMPLE_IMAGES}/train",
            "data.validation": f"{SAMPLE_IMAGES}/validation",
            "data.label": "concept",
            "data.min_crop_scale": 0.2,
            "data.num_readers": 1,
            "model.image_size": 48,
            "model.embedding_size": 64,
            "model.image_stem_width": 24,
            "model.image_widths": (24, 48, 96, 192),
            "model.image_depths": (1, 1, 1, 1),
            "optimizer.batch_size": 128,
            "optimizer.learning_rate_base": 2e-3,
            "optimizer.learning_rate_tempnet": 3e-3,
            **TWO_WORKERS,
            "validation.every": 300,
            "validation.num_train_images": 4_000,
        },
    )


PRESETS: dict[str, Preset] = named(twins_of(_FULL, small, "sample images") | _FULL)
"""Preset name → function that returns its configuration."""
