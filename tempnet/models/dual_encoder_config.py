"""Configuration of a dual encoder, stored as a small JSON file beside its weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tempnet.network_config import read_json

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
# File in which Transformers stores how an image becomes the pixels of a model.
PREPROCESSOR_FILE = "preprocessor_config.json"
# Directories of the towers in an export.
IMAGE_ENCODER_DIRECTORY = "image_encoder"
TEXT_ENCODER_DIRECTORY = "text_encoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class DualEncoderConfig:
    """Sizes of a dual encoder's inputs and embeddings (TempNet §6.2 and Appendix D); fields out of range raise ValueError."""

    embedding_size: int = 256
    """Dimension d of the embeddings."""
    image_size: int = 224
    """Side S of the square images, in pixels."""
    image_mean: tuple[float, float, float] = _IMAGENET_MEAN
    """Means of red, green and blue, in [0, 1], over the training images of the image tower; ImageNet's by default."""
    image_std: tuple[float, float, float] = _IMAGENET_STD
    """Standard deviations of red, green and blue over the same images."""
    num_text_tokens: int = 30
    """Number t of tokens of a text, including padding; longer texts are truncated."""

    def __post_init__(self) -> None:
        for name in ("embedding_size", "image_size", "num_text_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"DualEncoderConfig.{name} = {getattr(self, name)} must be at least 1")
        for name in ("image_mean", "image_std"):
            if len(getattr(self, name)) != 3:
                raise ValueError(f"DualEncoderConfig.{name} = {getattr(self, name)} must have three numbers: R, G, B")
        if min(self.image_std) <= 0.0:
            raise ValueError(f"DualEncoderConfig.image_std = {self.image_std} must be positive")

    def save(self, path: Path) -> None:
        """Write the fields to a JSON file."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def preprocessor(self) -> dict[str, Any]:
        """Return the configuration of the Transformers image processor that makes pixels from images.

        It resizes the shorter side to S by a bicubic filter, takes the central square, and normalises.
        """
        side = self.image_size
        return {
            "image_processor_type": "CLIPImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": side},
            "resample": 3,  # bicubic
            "do_center_crop": True,
            "crop_size": {"height": side, "width": side},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
        }

    @classmethod
    def of_clip(cls, clip: Any, directory: Path) -> DualEncoderConfig:
        """Return the configuration of a Transformers CLIPModel, with that of the image preprocessor in its directory."""
        from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

        path = directory / PREPROCESSOR_FILE
        preprocessor = read_json(path) if path.is_file() else {}
        return cls(
            embedding_size=clip.projection_dim,
            image_size=clip.vision_config.image_size,
            image_mean=tuple(preprocessor.get("image_mean", OPENAI_CLIP_MEAN)),
            image_std=tuple(preprocessor.get("image_std", OPENAI_CLIP_STD)),
            num_text_tokens=clip.text_config.max_position_embeddings,
        )
