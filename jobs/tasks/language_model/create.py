"""Creates the tasks of training language models on a worker, from what the driver knows of their data.

Workers import this module and not that of the plan, which imports what reports need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.engine.task import Task
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.text.data import find
from pipelines.features import Features
from pipelines.text.growing import GrowingManifest
from pipelines.text.manifest import Manifest
from tempnet.base_model import BaseReference


def create_task(
    config: LanguageModelConfig,
    train: str | GrowingManifest,
    validation: str,
    base: BaseReference | None,
    features: tuple[str, str] | None,
    rank: int,
    world_size: int,
) -> Task:
    """Create the task on a worker.

    Args:
        config: configuration of the run.
        train: directory of the prepared training data, or what is known of them while they still grow.
        validation: directory of the prepared validation data.
        base: reference to the frozen base model; None if the base is trained.
        features: directories of the stored hidden states of both data sets; None if the base computes them.
        rank: rank of this worker.
        world_size: number of workers.
    """
    from jobs.tasks.language_model.task import LanguageModelTask

    config = config.with_num_workers(world_size)
    return LanguageModelTask(config, *load_data(train, validation, base, features), rank, world_size)


def create_group_task(
    data: tuple[Any, ...],
    names: Sequence[str],
    configs: Sequence[LanguageModelConfig],
    group: LanguageModelConfig,
    rank: int,
    world_size: int,
) -> Task:
    """Create the task of several runs on a worker; `data` holds the arguments of :func:`load_data`."""
    from jobs.tasks.language_model.side_by_side import SideBySideTask

    group = group.with_num_workers(world_size)
    return SideBySideTask(group, *load_data(*data), rank, world_size, names=names, configs=configs)


def load_data(
    train: str | GrowingManifest, validation: str, base: BaseReference | None, features: tuple[str, str] | None
) -> tuple[Manifest | GrowingManifest, Manifest, BaseReference | None, tuple[Features, Features] | None]:
    """Return the data of a task on a worker; the arguments are those of :func:`create_task`."""
    train_data, validation_data = find(train), Manifest.load(validation)
    stored = None
    if features is not None:
        assert isinstance(train_data, Manifest)  # the configuration refuses the other case
        stored = Features.load(features[0], train_data), Features.load(features[1], validation_data)
    return train_data, validation_data, base, stored
