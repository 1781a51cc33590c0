"""The settings of a prediction for pairs: a configuration checked against model, TempNets and archives.

All of this happens before Ray is started.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from jobs.engine.fields import absolute_path
from jobs.engine.fingerprints import tempnet_digest
from jobs.scoring.dual_encoders.encoder import caption_encoder
from jobs.scoring.dual_encoders.identity import model_record, pairs_record
from jobs.scoring.dual_encoders.units import DualEncoderSpec
from jobs.scoring.models import model_labels
from jobs.scoring.temperatures.pairs.config import PredictPairTemperaturesConfig
from jobs.tasks.base import naming_field
from pipelines.images.captions import CaptionNoise
from pipelines.images.prepare import PrepareImagesConfig, check_source
from pipelines.local_copy import local_copy
from tempnet.models.dual_encoder import (
    IMAGE_TEMPNET_DIRECTORY,
    TEXT_TEMPNET_DIRECTORY,
    DualEncoder,
    load_pair_tempnets,
)
from tempnet.network import TempNet

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPredictionSettings:
    """Settings for the workers; local paths are absolute, because a worker has its own working directory."""

    images: PrepareImagesConfig
    model: DualEncoderSpec
    tempnet: str
    batch_size: int
    precision: Literal["fp32", "bf16"]
    part_pairs: int
    with_embeddings: bool
    tau_ranges: tuple[tuple[float, float], tuple[float, float]]
    """[τ₀, τ_max] at inference, for images and for texts."""
    tempnet_digests: tuple[str, str]
    noise: CaptionNoise = field(default_factory=CaptionNoise)
    """Noise that is added to the captions before their temperatures are predicted."""

    def record(self) -> dict[str, Any]:
        """Returns everything that decides the table, as a flat mapping.

        The locations of files, the batch size and the tolerated share of problems do not belong to it. The contents of
        archives are identified by their sizes; an archive that changes while it is read is detected by checksums.
        """
        names = ("precision", "part_pairs", "with_embeddings")
        return {
            "version": FORMAT_VERSION,
            "kind": "image-text pairs",
            **{name: getattr(self, name) for name in names},
            **model_record(self.model),
            "tempnet_image": self.tempnet_digests[0],
            "tempnet_text": self.tempnet_digests[1],
            **({"caption_noise": [self.noise.share, self.noise.seed]} if self.noise.share else {}),
            **pairs_record(self.images),
        }


def resolve_settings(config: PredictPairTemperaturesConfig) -> PairPredictionSettings:
    """Returns the settings for a configuration.

    Raises:
        FileNotFoundError, OSError: if images, captions, the model or a TempNet are missing.
        ValueError: if they do not fit together.
    """
    images = PrepareImagesConfig(
        source=absolute_path(config.images),
        captions=absolute_path(config.captions),
        splits=config.splits,
        max_bad_share=config.max_bad_share,
    )
    check_source(images)
    tempnet = config.tempnet or config.model
    with naming_field("tempnet = " if config.tempnet else "model = "):
        networks = load_pair_tempnets(local_copy(tempnet))
    (label,) = model_labels([config.model])
    model = DualEncoderSpec.read(label, config.model, field="model")
    caption_encoder(model, field="model")
    embedding_size = DualEncoder.from_pretrained(local_copy(model.path)).config.embedding_size
    for name, network in zip((IMAGE_TEMPNET_DIRECTORY, TEXT_TEMPNET_DIRECTORY), networks, strict=True):
        if network.config.kind != "embeddings" or network.config.input_size != embedding_size:
            raise ValueError(
                f"{tempnet}/{name} reads {network.config.input_size} {network.config.kind}, the embeddings of "
                f"{config.model} have a size of {embedding_size}"
            )
    return PairPredictionSettings(
        images=images,
        model=model,
        tempnet=absolute_path(tempnet),
        batch_size=config.batch_size,
        precision=config.precision,
        part_pairs=config.part_pairs,
        with_embeddings=config.with_embeddings,
        tau_ranges=(_tau_range(networks[0]), _tau_range(networks[1])),
        tempnet_digests=(tempnet_digest(networks[0]), tempnet_digest(networks[1])),
    )


def _tau_range(network: TempNet) -> tuple[float, float]:
    config = network.config
    return config.tau_min, config.tau_max if config.tau_max_eval is None else config.tau_max_eval
