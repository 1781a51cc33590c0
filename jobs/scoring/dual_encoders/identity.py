"""What decides a table that is made of a dual encoder and image–text pairs, as flat mappings to compare runs by."""

from __future__ import annotations

from typing import Any

from jobs.scoring.dual_encoders.units import DualEncoderSpec
from pipelines.images.prepare import PrepareImagesConfig, check_source
from pipelines.storage import relative, resolve


def model_record(model: DualEncoderSpec) -> dict[str, Any]:
    """Returns the digest of a dual encoder and the sizes of what it reads, without its location."""
    return {f"model.{name}": getattr(model, name) for name in ("digest", "image_size", "num_text_tokens")}


def pairs_record(images: PrepareImagesConfig) -> dict[str, Any]:
    """Returns the archives of a source of pairs and their captions, without locations and the tolerated problems.

    The contents of archives are identified by their sizes; an archive that changes while it is read is detected by
    checksums.

    Raises:
        FileNotFoundError, ValueError: if the images or captions are missing or not understood.
    """
    archives, captions = check_source(images)
    root = resolve(images.source)[1]
    return {
        "num_captioned_images": None if captions is None else len(captions.captions),
        "splits": list(images.splits),
        **{
            f"archive {relative(archive.path, root)} (bytes)": [archive.num_bytes, len(archive.files)]
            for archive in archives
        },
    }
