"""Make small runs on the frozen towers of a random dual encoder, and store its embeddings, without Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from clip_support import SIDE, make_dual_encoder, make_pairs
from image_archive_support import prepare
from torch import nn

from jobs.engine.config import OptimizerSection, RunSection, WorkersSection
from jobs.scoring.features import Towers, read_pairs, units_of
from jobs.scoring.units import UnitStore
from jobs.tasks.base import DataReference
from jobs.tasks.dual_encoder.config import (
    ClipConfig,
    DualEncoderSection,
    PairDataSection,
    PairTemperatureSection,
    RetrievalValidationSection,
)
from jobs.tasks.dual_encoder.task import (
    ClipTask,
    caption_noise,
    embeddings_of,
    pair_source,
    refer_to_towers,
    tensors_of,
)
from pipelines.features import PairEmbeddings
from pipelines.images.manifest import ImageManifest
from tempnet.contrastive.config import gamma_at

NUM_STEPS, BATCH_SIZE = 10, 8
"""Steps of a run, which are more than an epoch of 56 pairs, and pairs of a batch."""


def make_frozen_config(directory: Path) -> ClipConfig:
    """Write an encoder and 56 pairs, most of which share their image with others, and return a run on central views."""
    make_pairs(directory / "pairs")
    return ClipConfig(
        run=RunSection(name="towers", storage=str(directory), num_steps=NUM_STEPS),
        data=PairDataSection(
            train=str(directory / "pairs"),
            validation=str(directory / "pairs"),
            num_text_tokens=40,
            view="central",
            caption_noise=0.5,
            shuffle_window=20,
        ),
        model=DualEncoderSection(
            path=make_dual_encoder(directory / "encoder"), freeze=True, image_size=SIDE, embedding_size=12
        ),
        temperature=PairTemperatureSection(loss="tempnet", rho=1.0, hidden_size=6, num_prototypes=5),
        # With a smaller epsilon, Adam would make full-sized steps of gradients that are only rounding errors.
        optimizer=OptimizerSection(batch_size=BATCH_SIZE, learning_rate_tempnet=0.01, epsilon=1e-4),
        workers=WorkersSection(precision="fp32", zero_stage=0, num_workers=1),
        validation=RetrievalValidationSection(num_images=7, batch_size=4),
    )


def from_features(config: ClipConfig) -> ClipConfig:
    """Return the same run on stored embeddings."""
    return replace(config, model=replace(config.model, features=True), run=replace(config.run, name="features"))


def prepare_pairs(config: ClipConfig) -> ImageManifest:
    """Index the pairs of a run."""
    manifest = prepare(Path(config.data.train), Path(config.run.storage) / "index")
    manifest.save()
    return manifest


def store(config: ClipConfig, pairs: ImageManifest, split: str) -> PairEmbeddings:
    """Store the embeddings of train or validation as the job does, one file after the other."""
    towers = refer_to_towers(config)
    embeddings = embeddings_of(config, pairs, towers, split)
    Path(embeddings.directory).mkdir(parents=True)
    model = Towers(config)
    source = replace(pair_source(config, pairs), caption_noise=caption_noise(config, split))
    for unit in units_of(embeddings):
        for item in read_pairs(source, unit):
            UnitStore(embeddings.directory).write(model(item).files)
    embeddings.save(towers.digest)
    return embeddings


def make_data(
    config: ClipConfig, pairs: ImageManifest, stored: tuple[PairEmbeddings, PairEmbeddings] | None
) -> DataReference:
    """Return the data of a task on the pairs, or on their stored embeddings."""
    features = None if stored is None else (stored[0].directory, stored[1].directory)
    directory = pairs.directory
    return DataReference(train=directory, validation=directory, base=refer_to_towers(config), features=features)


def train_alone(task: ClipTask) -> tuple[list[float], list[int]]:
    """Train a task that is built, by autograd and PyTorch's own optimizer; return losses and digests of all steps."""
    from jobs.engine.deepspeed_engine import make_optimizer  # imports DeepSpeed, which takes seconds

    config: Any = task.config
    parameters = list(task.module.loss.parameters())
    optimizer, scheduler = make_optimizer([(task.parameter_groups(), config)])
    losses, digests = [], []
    stream = replace(task.stream, num_readers=0)  # read in this process
    for step, batch in enumerate(stream.batches(0, NUM_STEPS * BATCH_SIZE)):
        gamma = gamma_at(config.temperature.loss_config, step, config.run.num_steps)
        is_steered = task.steering.follows(optimizer)
        output = task.module(**tensors_of(batch, next(task.module.parameters()).device), gamma=gamma)
        output["loss"].backward()
        nn.utils.clip_grad_norm_(parameters, config.optimizer.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if is_steered:
            task.steering.observe(output["tau"].flatten(), output["dual_gradient"].flatten())
        losses.append(output["loss"].item())
        digests.append(int(batch["digest"].sum()))
    return losses, digests
