"""What a kind of training tells the loop and the driver: everything that is not the same for all of them.

The driver holds a `Plan`; after the data are prepared it sends a `TaskSpec` to the workers, where it becomes a `Task`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from pipelines.storage import write_json
from pipelines.stream import Batch, RankStream
from torch import Tensor, nn

from jobs.engine.config import TrainingConfig
from jobs.engine.tracking import TrackedRun

if TYPE_CHECKING:  # the driver has no use for it
    from deepspeed import DeepSpeedEngine

ParameterGroup: TypeAlias = dict[str, Any]
"""`name` (whose schedule is logged under it), `parameters`, `learning_rate`."""


class Statistics(Protocol):
    """Sums of a step, which are added over the ranks."""

    @property
    def sums(self) -> Tensor:
        """May be changed in place."""
        ...

    def summary(self) -> dict[str, float]:
        """Means and the like; `tau_mean` is shown with the progress."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one rank did in a step."""

    loss: Tensor
    """This rank's part, detached: the sum over ranks is the loss."""
    statistics: Statistics | None


class Task(Protocol):
    """One worker's side."""

    @property
    def stream(self) -> RankStream:
        """This rank's part of the data."""
        ...

    @property
    def module(self) -> nn.Module:
        """There once :meth:`build` was called."""
        ...

    @property
    def unit(self) -> str:
        """What is counted for speed: `tokens`, `pairs`."""
        ...

    def build(self, *, is_fresh: bool) -> None:
        """Make the module, the same on every rank, and read what validation needs. Reading data has begun by then.

        Args:
            is_fresh: whether the run begins; a continued run's weights come from its checkpoint.
        """
        ...

    def parameter_groups(self) -> list[ParameterGroup]:
        """Trainable parameters by schedule."""
        ...

    def flops_per_unit(self) -> float | None:
        """FLOPs that the mathematics of one trained unit needs; None if that is not known."""
        ...

    def num_units(self, batch: Batch) -> int:
        """Units in this rank's part of a batch."""
        ...

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        """Forward, backward and update. `step` counts from 0, `num_units` are those of the global batch."""
        ...

    def validate(
        self, engine: DeepSpeedEngine, *, with_details: bool
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Scores, equal on all ranks, and, on rank 0 if asked for, what the report wants to know."""
        ...

    def describe(self, scores: Mapping[str, float]) -> str:
        """Scores in half a line."""
        ...

    def rating(self, scores: Mapping[str, float]) -> float | None:
        """The score by which the best model is exported, the higher the better; None exports the last."""
        ...

    def export(self) -> None:
        """Write the model to `<run>/export`; all ranks call it, the first one writes."""
        ...

    def save(self, directory: Path) -> None:
        """This rank's part of what the engine does not hold, into a checkpoint."""
        ...

    def load(self, directory: Path, num_writers: int) -> None:
        """The inverse, for any number of workers that wrote it."""
        ...


class TaskSpec(Protocol):
    """What travels to the workers."""

    def create(self, rank: int, world_size: int) -> Task:
        """A worker's side; it must be quick, as reading data starts after it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTask:
    """What a plan becomes once its data are there."""

    config: TrainingConfig
    """For the workers: absolute paths, everything resolved."""
    spec: TaskSpec
    parameters: Mapping[str, Any]
    """Resolved values for MLflow, beside the configuration."""
    data_sets: Mapping[str, tuple[str, str, str]]
    """Context → (name, digest, source URI), for MLflow."""
    outcome: Mapping[str, Any]
    """What the outcome of the run says beside the worker's results."""
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """File name → JSON object. Kept in the run's directory, so that a run that is continued finds them there."""

    def write_records(self, directory: str) -> None:
        """Write the records into a directory that exists: that of a run whose name has been claimed."""
        for name, values in self.records.items():
            write_json(f"{directory}/{name}", values)


class Plan(Protocol):
    """The driver's side: what a configuration comes to, known before anything starts."""

    @property
    def config(self) -> TrainingConfig:
        """As the person gave it."""
        ...

    @property
    def tracking_uri(self) -> str:
        """Empty: nothing is tracked."""
        ...

    @property
    def data_cpus(self) -> float:
        """Logical CPUs that reading takes beside the workers."""
        ...

    def describe(self) -> str:
        """For a person."""
        ...

    def prepare(self) -> PreparedTask:
        """Prepare the data (needs Ray) and resolve what depends on them."""
        ...

    def summary_table(self, outcome: Mapping[str, Any]) -> str:
        """The results of a run, for a person."""
        ...

    def write_report(self, directory: Path, outcome: Mapping[str, Any], tracked: TrackedRun | None) -> None:
        """Pictures and pages of a finished run."""
        ...


def data_set(uri: str, digest: str) -> tuple[str, str, str]:
    """An entry of `PreparedTask.data_sets`."""
    return uri.rstrip("/").rsplit("/", 1)[-1], digest, uri


def with_and_without_decay(groups: list[ParameterGroup], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: no decay for vectors and scalars (biases, norms, φ, b, w3)."""
    result = []
    for group in groups:
        for decay, members in (
            (weight_decay, [parameter for parameter in group["parameters"] if parameter.ndim >= 2]),
            (0.0, [parameter for parameter in group["parameters"] if parameter.ndim < 2]),
        ):
            if members:
                result.append(
                    {
                        "name": group["name"],
                        "params": members,
                        "lr": group["learning_rate"],
                        "weight_decay": decay,
                    }
                )
    return result


def trainable(module: nn.Module | None) -> list[torch.nn.Parameter]:
    """The parameters of a part that learn; none of no part."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad] if module is not None else []
