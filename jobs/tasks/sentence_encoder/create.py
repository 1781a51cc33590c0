"""Creates the task of training a sentence encoder on a worker, from what the driver knows of its data."""

from __future__ import annotations

from jobs.engine.task import Task
from jobs.tasks.sentence_encoder.config import SentenceConfig
from jobs.tasks.text.data import find
from pipelines.text.growing import GrowingManifest
from pipelines.text.manifest import Manifest


def create_task(
    config: SentenceConfig, train: str | GrowingManifest, validation: str, rank: int, world_size: int
) -> Task:
    """Create the task on a worker.

    Args:
        config: configuration of the run.
        train: directory of the prepared training documents, or what is known of them while they still grow.
        validation: directory of the prepared validation documents.
        rank: rank of this worker.
        world_size: number of workers.
    """
    from jobs.tasks.sentence_encoder.task import SentenceTask

    config = config.with_num_workers(world_size)
    return SentenceTask(config, find(train), Manifest.load(validation), rank, world_size)
