"""What all kinds of training have in common on the driver (`BasePlan`) and on a worker (`BaseTask`).

A kind of training derives from both and adds what is special to it; the interfaces are in `jobs.engine.task`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from jobs.engine.config import OptimizerSection, TrainingConfig
from jobs.engine.fields import resolve_fields, with_absolute_paths
from jobs.engine.task import ParameterGroup, PreparedTask, trainable
from jobs.engine.tracking import TrackedRun
from pipelines.plan import StreamPlan
from pipelines.stream import READ_CPUS, Batch, RankStream, Source

Config = TypeVar("Config", bound=TrainingConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class BasePlan(ABC, Generic[Config]):
    """A plan with the defaults of `jobs.engine.task.Plan`: one reader for every worker, and no pages in the report."""

    config: Config
    """Configuration as the user gave it."""
    tracking_uri: str
    """MLflow tracking URI; empty if the run is not logged."""

    @property
    def data_cpus(self) -> float:
        """Number of logical CPUs that reading data takes in addition to the workers."""
        return READ_CPUS * self.config.workers.max_workers

    @abstractmethod
    def describe(self) -> str:
        """Return the plan as text for the terminal."""

    @abstractmethod
    def prepare(self) -> PreparedTask:
        """Prepare the data and resolve the values that depend on them."""

    @abstractmethod
    def summary_table(self, outcome: Mapping[str, Any]) -> str:
        """Return the results of a finished run as text for the terminal."""

    def write_report(self, directory: Path, outcome: Mapping[str, Any], tracked: TrackedRun | None) -> None:
        """Write the plots and pages of a finished run into a directory; none by default."""


class BaseTask(ABC, Generic[Config]):
    """A task with the defaults of `jobs.engine.task.Task`.

    A unit is a sample, the FLOPs are unknown, the last model is exported, and there is no state besides what DeepSpeed
    saves.

    Args:
        config: configuration of the run.
        source: the training data.
        plan: order in which the samples are visited.
        rank: rank of this worker.
        world_size: number of workers.
        reading: further fields of `pipelines.stream.RankStream`, which say how the data are read.
    """

    unit: str

    def __init__(
        self,
        config: Config,
        source: Source,
        *,
        plan: StreamPlan,
        rank: int,
        world_size: int,
        **reading: Any,
    ) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self.stream = RankStream(
            source=source,
            plan=plan,
            batch_size=config.optimizer.batch_size,
            rank=rank,
            world_size=world_size,
            **reading,
        )

    def flops_per_unit(self) -> float | None:
        """Return the FLOPs that training on one unit mathematically needs; None, because they are unknown."""
        return None

    def num_units(self, batch: Batch) -> int:
        """Return the number of samples in this rank's part of a batch."""
        return len(batch["digest"])  # Every source returns digests (`pipelines.stream.Source`).

    def rating(self, scores: Mapping[str, float]) -> float | None:
        """Return None, so that the last model is exported."""
        return None

    def save(self, directory: Path) -> None:
        """Save nothing: there is no state besides what DeepSpeed saves."""

    def load(self, directory: Path, num_writers: int) -> None:
        """Load nothing: there is no state besides what DeepSpeed saves."""


def resolve_paths(config: Config) -> Config:
    """Return the configuration for the workers, which have another working directory than the driver.

    Local paths are absolute, the storage is the resolved one, and no field leaves its value to the machine. If the
    configuration has a `tokenizer`, then `data.tokenizer` names the tokenizer that is used.
    """
    given: Any = config  # the data section and the tokenizer differ between tasks
    changes: dict[str, Any] = {"run": dataclasses.replace(config.run, storage=config.run.resolved_storage)}
    if hasattr(given, "tokenizer"):
        changes["data"] = dataclasses.replace(given.data, tokenizer=given.tokenizer)
    return with_absolute_paths(resolve_fields(dataclasses.replace(config, **changes)))


def base_and_tempnet_groups(
    base: Sequence[nn.Module | None], tempnets: Sequence[nn.Module | None], settings: OptimizerSection
) -> list[ParameterGroup]:
    """Return two parameter groups, the base model and the TempNets, each with its own learning rate."""
    return [
        {"name": "base", "parameters": trainable(*base), "learning_rate": settings.learning_rate_base},
        {"name": "tempnet", "parameters": trainable(*tempnets), "learning_rate": settings.learning_rate_tempnet},
    ]


def count_parameters(*modules: nn.Module | None) -> int:
    """Return the number of parameters of the modules; None has none."""
    return sum(parameter.numel() for module in modules if module is not None for parameter in module.parameters())


@contextmanager
def naming_field(field: str) -> Iterator[None]:
    """Begin the message of a ValueError or OSError raised inside the block with the name of a field."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise type(error)(f"{field}{error}") from error
