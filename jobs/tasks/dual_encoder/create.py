"""Creates the tasks of training dual encoders on a worker, from what the driver knows of their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jobs.engine.task import Task
from jobs.tasks.dual_encoder.config import ClipConfig
from pipelines.features import PairEmbeddings
from pipelines.images.manifest import ImageManifest
from tempnet.base_model import BaseReference

if TYPE_CHECKING:  # the driver does not need DeepSpeed
    from jobs.tasks.dual_encoder.task import PairData


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReference:
    """What a worker needs to find the data of a task (`jobs.tasks.dual_encoder.task.PairData`)."""

    train: str
    """Directory of the prepared training pairs."""
    validation: str
    """Directory of the prepared validation pairs."""
    given_tau: np.ndarray | None
    """(2, N) temperatures, float32, of the images and texts of the N training pairs for the loss `sogclr_given`."""
    towers: BaseReference | None
    """Reference to the frozen towers; None if the towers are trained."""
    embeddings: tuple[str, str] | None
    """Directories of the stored embeddings of both data sets; None if the towers compute them."""

    def load(self) -> PairData:
        """Return the data."""
        from jobs.tasks.dual_encoder.task import PairData

        train, validation = ImageManifest.load(self.train), ImageManifest.load(self.validation)
        stored = None
        if self.embeddings is not None:
            first, second = self.embeddings
            stored = PairEmbeddings.load(first, train), PairEmbeddings.load(second, validation)
        return PairData(
            train=train, validation=validation, given_tau=self.given_tau, towers=self.towers, embeddings=stored
        )


def create_task(config: ClipConfig, data: DataReference, rank: int, world_size: int) -> Task:
    """Create the task of a run on a worker.

    Args:
        config: configuration of the run.
        data: where its data are.
        rank: rank of this worker.
        world_size: number of workers.
    """
    from jobs.tasks.dual_encoder.task import ClipTask

    return ClipTask(config.with_num_workers(world_size), data.load(), rank, world_size)


def create_group_task(
    data: DataReference,
    names: Sequence[str],
    configs: Sequence[ClipConfig],
    group: ClipConfig,
    rank: int,
    world_size: int,
) -> Task:
    """Create the task of several runs on a worker (`jobs.engine.task.CreateGroupTask`)."""
    from jobs.tasks.dual_encoder.side_by_side import SideBySideTask

    group = group.with_num_workers(world_size)
    return SideBySideTask(group, data.load(), rank, world_size, names=names, configs=configs)
