"""The plan of training an image encoder: checks its configuration without Ray, prepares the images, and shows the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from jobs.engine.launch import tracking_uri
from jobs.engine.task import Plan, PreparedTask, data_sets
from jobs.tasks.base import DataReference, count_parameters, create_task, describe_tau, naming_field, resolve_paths
from jobs.tasks.config import check_sizes
from jobs.tasks.image_encoder.config import ImageEncoderConfig
from jobs.tasks.image_encoder.task import build_model, probed_images, read_classes
from jobs.tasks.images import preparation, prepare_split
from pipelines.images.prepare import check_source
from pipelines.stream import READ_CPUS


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEncoderPlan(Plan[ImageEncoderConfig]):
    """The plan of training an image encoder."""

    unit = "images"
    curves: ClassVar = {
        "loss (training objective)": ("train/loss",),
        "linear probe": ("validation/probe_accuracy",),
        "τ": ("train/tau_q05", "train/tau_mean", "train/tau_q95"),
    }

    num_parameters: int
    """Number of parameters of the encoder with its projection head."""
    num_network_parameters: int
    """Number of parameters of the loss's networks; 0 without any."""

    @property
    def data_cpus(self) -> float:
        return READ_CPUS * self.config.data.num_readers * self.config.workers.max_workers

    @property
    def _loss(self) -> str:
        loss = self.config.temperature.loss_config
        details = f", ρ = {loss.rho:g}" if loss.kind.uses_rho else ""
        return loss.name + (f", τ = {loss.tau:g}" if loss.kind.temperature == "fixed" else details)

    def describe(self) -> str:
        config = self.config
        size, workers = config.optimizer.batch_size, config.workers.max_workers
        return self.describe_lines(
            about={
                "loss": self._loss,
                "batch": f"{size} images in two views: {workers} workers × {size // workers}; each view against "
                f"{2 * size - 2} others",
            },
            num_units=size,
            readers=f"; {config.data.num_readers} readers each",
            parameters=f"encoder with its head {self.num_parameters:,}, networks of the loss "
            f"{self.num_network_parameters:,}",
            num_trained=self.num_parameters + self.num_network_parameters,
        )

    def prepare(self) -> PreparedTask:
        """Index the images, unless this was done before, and check that the probe has something to tell apart."""
        config = resolve_paths(self.config)
        train, validation = prepare_split(config, "train"), prepare_split(config, "validation")
        size = config.optimizer.batch_size
        check_sizes(config, config.temperature, num_samples=train.num_pairs, num_pairs_per_batch=size, noun="images")
        classes = read_classes(train)
        probed = probed_images(train.num_pairs, config.validation.num_train_images)
        if (num_probed := len(np.unique(classes[probed]))) < 2:
            raise ValueError(
                f"data.label = {config.data.label!r} gives the training images that the linear probe reads {num_probed} "
                "class, and it needs two or more"
            )
        loss = config.temperature.loss_config
        num_unknown = int(np.isin(read_classes(validation), classes, invert=True).sum())
        if num_unknown:
            print(
                f"warning: {num_unknown} of {validation.num_pairs} images of data.validation have a class that no image of "
                "data.train has; the linear probe is wrong about them",
                flush=True,
            )
        data = DataReference(train=train.directory, validation=validation.directory)
        num_classes = len(np.unique(classes))
        return PreparedTask(
            create_task=partial(create_task, "jobs.tasks.image_encoder.task:ImageEncoderTask", config, data),
            num_samples=train.num_pairs,
            parameters={"num_images": train.num_pairs, "num_classes": num_classes},
            data_sets=data_sets(self.config.data, train, validation),
            outcome={
                "loss": self._loss,
                "tau_min": loss.tau_min,
                "tau_max": loss.tau_max,
                "num_classes": num_classes,
                "num_images_of_unknown_class": num_unknown,
                "num_samples_lost": {"train": dict(train.problems), "validation": dict(validation.problems)},
            },
        )

    def rows(self, outcome: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the accuracy of the linear probe and the temperatures."""
        scores = outcome["validation"]
        name = f"linear probe, {outcome['num_classes']} classes"
        return [("loss", outcome["loss"]), (name, f"{scores['probe_accuracy']:.2%}"), *describe_tau(scores)]


def make_plan(config: ImageEncoderConfig) -> ImageEncoderPlan:
    """Make the plan of a run, checking everything that can be checked without Ray."""
    uri = tracking_uri(config)
    for split in ("train", "validation"):
        with naming_field(f"data.{split}: "):
            check_source(preparation(config, split))
    if config.workers.activation_checkpointing:
        raise ValueError("workers.activation_checkpointing = True is for text models: choose False")
    module = build_model(config, num_images=1, device=torch.device("cpu"))
    return ImageEncoderPlan(
        config=config,
        num_parameters=count_parameters(module.tower, module.head),
        num_network_parameters=count_parameters(module.loss),
        tracking_uri=uri,
    )
