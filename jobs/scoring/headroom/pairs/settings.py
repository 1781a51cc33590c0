"""The settings of a headroom test of an image–text model: a configuration checked against model and archives.

All of this happens before Ray is started. How many images can be read is known only once they are prepared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jobs.engine.fields import absolute_path
from jobs.scoring.dual_encoders.encoder import caption_encoder
from jobs.scoring.dual_encoders.identity import model_record, pairs_record
from jobs.scoring.dual_encoders.units import DualEncoderSpec
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.models import model_labels
from jobs.tasks.base import naming_field
from pipelines.images.prepare import PrepareImagesConfig, check_source
from pipelines.local_copy import local_copy
from tempnet.models.training_temperature import load_training_temperature

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PairHeadroomSettings:
    """Settings for the workers; local paths are absolute, because a worker has its own working directory."""

    images: PrepareImagesConfig
    model: DualEncoderSpec
    own_tau: float | None
    """The constant temperature that the model was trained at; None if it has none."""
    precision: Literal["fp32", "bf16"]
    batch_size: int
    gallery_images: int
    gallery_seed: int

    def record(self) -> dict[str, Any]:
        """Returns everything that decides what is measured, as a flat mapping."""
        names = ("own_tau", "precision", "gallery_images", "gallery_seed")
        return {
            "version": FORMAT_VERSION,
            "kind": "image-text pairs",
            **{name: getattr(self, name) for name in names},
            **model_record(self.model),
            **pairs_record(self.images),
        }


def resolve_settings(config: Headroom) -> PairHeadroomSettings:
    """Returns the settings for a configuration with images.

    Raises:
        FileNotFoundError, OSError: if images, captions or the model are missing.
        ValueError: naming the field, if they do not fit together or the model is none of images and texts.
    """
    assert config.precision in ("fp32", "bf16")
    images = PrepareImagesConfig(
        source=absolute_path(config.images),
        captions=absolute_path(config.captions),
        splits=config.splits,
        max_bad_share=config.max_bad_share,
    )
    with naming_field("images: "):
        check_source(images)
    (label,) = model_labels([config.model])
    model = DualEncoderSpec.read(label, config.model, field="model")
    caption_encoder(model, field="model")
    with naming_field("model: "):
        own_tau = load_training_temperature(local_copy(model.path))
    return PairHeadroomSettings(
        images=images,
        model=model,
        own_tau=own_tau,
        precision=config.precision,
        batch_size=config.batch_size,
        gallery_images=config.gallery_images,
        gallery_seed=config.gallery_seed,
    )
