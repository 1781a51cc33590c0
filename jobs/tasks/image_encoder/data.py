"""The images that an encoder is trained on, their classes, the linear probe, and the module to train."""

from __future__ import annotations

import numpy as np
import torch

from jobs.tasks.base import autocast_dtype, unimodal_loss
from jobs.tasks.image_encoder.config import ImageEncoderConfig
from jobs.tasks.images import build_image_tower, cache_for, random_pairs
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from tempnet.models.dual_encoder_config import DualEncoderConfig
from tempnet.models.image_encoder import TemperatureImageEncoder

_NUM_ITERATIONS = 1000
_PROBE_SEED = 0  # the same images for all runs


def view_source(config: ImageEncoderConfig, manifest: ImageManifest) -> PairSource:
    """Return the source that reads two views of every image from prepared data."""
    return PairSource(
        manifest=manifest,
        image_size=config.model.image_size,
        seed=config.run.seed,
        augmentation=config.data.augmentation,
        num_views=2,
        cache_bytes=cache_for(config, manifest),
    )


def read_classes(manifest: ImageManifest) -> np.ndarray:
    """Return the names (n,) of the classes of all images of prepared data, in which they are the captions."""
    return np.array(PairSource(manifest=manifest, image_size=1).captions()[0])


def probed_images(num_images: int, limit: int) -> np.ndarray:
    """Return the sorted numbers of the images that the probe reads: `limit` random ones, or all if it is 0."""
    return random_pairs(num_images, min(limit or num_images, num_images), _PROBE_SEED)


def probe_accuracy(
    train: np.ndarray, labels: np.ndarray, held_out: np.ndarray, held_out_labels: np.ndarray, *, regularisation: float
) -> float:
    """Fit a logistic regression to standardised features (n, w) and labels (n,); return its accuracy on held-out ones.

    It is wrong about an image of a class that is not among the labels.
    """
    from sklearn.linear_model import LogisticRegression  # only rank 0 needs it
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(C=regularisation, max_iter=_NUM_ITERATIONS))
    return float(probe.fit(train, labels).score(held_out, held_out_labels))


def build_model(config: ImageEncoderConfig, *, num_images: int, device: torch.device) -> TemperatureImageEncoder:
    """Build the module, the same on every rank, with the loss's state of `num_images` partitioned among the ranks."""
    settings = config.model
    torch.manual_seed(config.run.seed)
    tower = build_image_tower(settings, settings.path, "model.path")
    loss = unimodal_loss(config.temperature, settings.embedding_size, num_samples=num_images, device=device)
    sizes = DualEncoderConfig(embedding_size=settings.embedding_size, image_size=settings.image_size)
    return TemperatureImageEncoder(tower, loss, sizes, autocast_dtype=autocast_dtype(config)).to(device)
