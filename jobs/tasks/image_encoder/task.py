"""The task of training an image encoder, as the training loop runs it on a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.engine.export import open_export
from jobs.engine.hardware import worker_device
from jobs.tasks.base import (
    DataReference,
    UnimodalTask,
    autocast_dtype,
    draw_samples,
    encode_all,
    order_of,
    to_device,
    unimodal_loss,
)
from jobs.tasks.image_encoder.config import ImageEncoderConfig
from jobs.tasks.images import build_image_tower, cache_for
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.stream import Batch
from tempnet.contrastive.losses import PairStatistics
from tempnet.contrastive.state import World
from tempnet.models.dual_encoder_config import DualEncoderConfig
from tempnet.models.image_encoder import TemperatureImageEncoder
from tempnet.statistics import histogram_of

if TYPE_CHECKING:  # the driver, which builds the model to check it, does not need DeepSpeed
    from deepspeed import DeepSpeedEngine


class ImageEncoderTask(UnimodalTask[ImageEncoderConfig]):
    """The task of training an image encoder; the methods are described in `jobs.engine.task.Task`.

    No model is rated, so that the last one is exported: choosing one by the probe would bias its score.
    """

    unit = "images"
    module: TemperatureImageEncoder

    def __init__(self, config: ImageEncoderConfig, data: DataReference, rank: int, world_size: int) -> None:
        self.train, self.validation = ImageManifest.load(data.train), ImageManifest.load(data.validation)
        self.source = view_source(config, self.train)
        reading = {**order_of(config, self.train), **config.data.reading}
        super().__init__(config, self.source, rank=rank, world_size=world_size, **reading)

    def build(self, *, is_fresh: bool) -> None:
        """Build the module with its per-image state, initialise the prototypes, and read the classes."""
        device = worker_device(self.config.workers)
        self.module = build_model(self.config, num_images=self.train.num_pairs, device=device)
        self.classes = read_classes(self.train), read_classes(self.validation)
        network = self.module.loss.tempnet
        if is_fresh and network is not None and network.config.projection:
            numbers = draw_samples(self.train.num_pairs, network.config.num_prototypes, self.config.run.seed)
            network.init_prototypes(F.normalize(self.module.head(self._features(self.source, numbers, device)), dim=-1))

    def inputs(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        return {name: to_device(batch[name], device) for name in ("images", "ids")}

    def statistics(self, output: Any, batch: Batch) -> PairStatistics:
        return PairStatistics.of(output, self.config.temperature.loss_config, ("first", "second"))

    def validate(
        self, engine: DeepSpeedEngine, *, with_details: bool
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return the accuracy of the linear probe, which rank 0 fits, and mean and spread of τ; the details: a histogram."""
        settings, device = self.config.validation, engine.device
        train = probed_images(self.train.num_pairs, settings.num_train_images)
        held_out = probed_images(self.validation.num_pairs, settings.num_images)
        features = self._features(self.source, train, device)
        of_held_out = self._features(view_source(self.config, self.validation), held_out, device)
        accuracy = 0.0
        if self.rank == 0:
            of_train = features.cpu().numpy(), self.classes[0][train]
            scored = of_held_out.cpu().numpy(), self.classes[1][held_out]
            accuracy = probe_accuracy(*of_train, *scored, regularisation=settings.regularisation)
        total = World.current().sum(torch.tensor(accuracy, dtype=torch.float64, device=device))
        tempnet, details, tau = self.module.loss.tempnet, dict[str, Any](), None
        if tempnet is not None:
            tau = tempnet(F.normalize(self.module.head(of_held_out), dim=-1)).double()
            details["histograms"] = {"image": histogram_of(tau, *self.config.temperature.tau_range).tolist()}
        return {"probe_accuracy": float(total)} | self.tau_scores(tau), details if with_details else None

    @torch.no_grad()
    def _features(self, source: PairSource, numbers: np.ndarray, device: torch.device) -> Tensor:
        """Return the features (n, w) of the central views of n images; every rank encodes a part. All must call this."""
        module, was_training = self.module, self.module.training
        module.eval()
        features = encode_all(
            lambda some: module.features(to_device(source.read_images(some), device)),
            numbers,
            World.current(),
            self.config.validation.batch_size,
        )
        module.train(was_training)
        return features

    def describe(self, scores: Mapping[str, float]) -> str:
        tau = f"; mean τ {scores['tau_mean']:.4f}" if "tau_mean" in scores else ""
        return f"linear probe {scores['probe_accuracy']:.2%}{tau}"

    def export(self) -> None:
        """Write the vision model with its image processor, and the TempNet of its embeddings."""
        if self.rank:
            return
        with open_export(self.config.run.export_directory) as directory:
            self.module.save_pretrained(directory)
            self.save_tempnet(directory)


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
    return draw_samples(num_images, min(limit or num_images, num_images), _PROBE_SEED)


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
