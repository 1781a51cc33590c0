"""Creates the task of training a classifier on a worker."""

from __future__ import annotations

from jobs.engine.task import Task
from jobs.tasks.classifier.config import ClassifierConfig


def create_task(config: ClassifierConfig, rank: int, world_size: int) -> Task:
    """Create the task on a worker."""
    from jobs.tasks.classifier.task import ClassifierTask

    return ClassifierTask(config.with_num_workers(world_size), rank, world_size)
