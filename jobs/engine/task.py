"""The interface between a task (a kind of training) and the loop and driver: everything that differs between tasks.

The driver holds a `Plan`. After the data are prepared, it sends a `CreateTask` to the workers, each of which calls it to
create its `Task`. `jobs.tasks.base` has the defaults of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import Size, Tensor, nn

from jobs.engine.config import TrainingConfig
from jobs.engine.metrics import TrackedRun
from pipelines.storage import write_json
from pipelines.stream import Batch, RankStream

if TYPE_CHECKING:  # the driver does not need DeepSpeed at run time
    from deepspeed import DeepSpeedEngine

ParameterGroup: TypeAlias = dict[str, Any]
"""A dictionary with `name` (under which the learning rate is logged), `parameters` and `learning_rate`."""


class Statistics(Protocol):
    """Statistics of a training step, stored as sums that are added over the ranks."""

    @property
    def sums(self) -> Tensor:
        """The sums of this rank; the loop replaces them in place by the sums over all ranks."""

    def summary(self) -> dict[str, float]:
        """Return metrics computed from the sums, such as means; `tau_mean` is shown with the progress."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one training step on one rank."""

    loss: Tensor
    """This rank's part of the loss, or of the losses of several runs, detached; the sum over all ranks is the step's."""
    statistics: Statistics | list[Statistics] | None
    """Statistics of the step, or of every one of several runs; None unless they were requested."""


class Task(Protocol):
    """A task on one worker: its data, its model, and how to train, validate, save and export it."""

    @property
    def config(self) -> TrainingConfig:
        """Configuration of the run, with absolute paths and all defaults resolved."""

    @property
    def stream(self) -> RankStream:
        """This rank's part of the training data."""

    @property
    def module(self) -> nn.Module:
        """The module that DeepSpeed trains; available after :meth:`build` was called."""

    @property
    def unit(self) -> str:
        """Name of the units in which the speed is counted, such as `tokens` or `pairs`."""

    @property
    def members(self) -> Sequence[Task]:
        """This task alone; or those of several runs whose networks are trained with the module of this task."""

    def build(self, *, is_fresh: bool) -> None:
        """Build the module, with the same weights on every rank, and read the validation data.

        Reading of the training data has already begun by then.
        """

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the trainable parameters, in one group for each learning rate and schedule."""

    def flops_per_unit(self) -> float | None:
        """Return the FLOPs that training on one unit mathematically needs; None if unknown."""

    def num_units(self, batch: Batch) -> int:
        """Return the number of units in this rank's part of a batch."""

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        """Run the forward pass, the backward pass and the optimizer step number `step`, counted from 0.

        `num_units` is the number of units in the global batch; `batch` is this rank's part of it.
        """

    def validate(
        self, engine: DeepSpeedEngine, *, with_details: bool
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return the scores, equal on all ranks, and with details on rank 0 what the report needs."""

    def validate_members(
        self, members: Sequence[Any], engine: DeepSpeedEngine, *, with_details: bool
    ) -> list[tuple[dict[str, float], dict[str, Any] | None]]:
        """Return what :meth:`validate` returns, for some of the members."""

    def describe(self, scores: Mapping[str, float]) -> str:
        """Format scores as a short text for a progress line."""

    def rating(self, scores: Mapping[str, float]) -> float | None:
        """Return the rating by which the best model is exported (higher is better); None: the last model is exported."""

    def export(self) -> None:
        """Write the model to the directory `export` of the run; all ranks call this, rank 0 writes."""

    def save(self, directory: Path) -> None:
        """Write this rank's state that DeepSpeed does not hold into a checkpoint directory."""

    def load(self, directory: Path, num_writers: int) -> None:
        """Restore what :meth:`save` wrote, whatever number of workers wrote it."""


CreateTask: TypeAlias = Callable[[int, int], Task]
"""A function that creates the task on a worker from its rank and the number of workers, such as a `functools.partial`.

The driver sends it to the workers. It must be fast, because reading data starts only afterwards, and it imports the
task's module itself, because that loads DeepSpeed, which the driver does not need.
"""


def create_members(
    create_task: CreateTask, configs: Sequence[TrainingConfig], group: TrainingConfig, rank: int, world_size: int
) -> Task:
    """Create the task of several runs that train side by side, with the configuration of their group, on a worker.

    It is that of any of them, which makes those of the others when it is built.
    """
    created = create_task(rank, world_size)
    task: Any = created
    task.config, *task.member_configs = (
        # The networks are small; DeepSpeed, which has one norm of all gradients under ZeRO, divides nothing.
        replace(one, workers=replace(one.workers, zero_stage=0, offload_optimizer=False, num_workers=world_size))
        for one in (group, *configs)
    )
    return created


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTask:
    """A plan whose data are prepared: everything needed to start the workers and to record the run."""

    create_task: CreateTask
    """Creates the task on a worker, with the configuration in which paths are absolute and all defaults resolved."""
    num_samples: int | None
    """Number of training samples, which form one epoch; None if it is not known yet (see `read_data_outcome`)."""
    parameters: Mapping[str, Any]
    """Resolved values that are logged to MLflow in addition to the configuration."""
    data_sets: Mapping[str, tuple[str, str, str]]
    """Context (such as training) → (name, digest, source URI) of the data sets that MLflow records."""
    outcome: Mapping[str, Any]
    """Entries of the run's outcome in addition to the worker's results."""
    read_data_outcome: Callable[[], Mapping[str, Any]] = dict
    """Called when training has ended, if data were prepared meanwhile: `num_samples`, None if some are still missing, and
    further entries of the outcome."""
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """File name → JSON object to write into the run's directory, where a continued run finds it."""
    config: TrainingConfig | None = None
    """The configuration of the task, by which it can also be trained beside others; None if it can only be trained alone."""

    def write_records(self, directory: str) -> None:
        """Write the records into the directory of the run, which must exist."""
        for name, values in self.records.items():
            write_json(f"{directory}/{name}", values)


class Plan(Protocol):
    """A task in the driver: everything that follows from a configuration before anything is started."""

    @property
    def config(self) -> TrainingConfig:
        """Configuration as the user gave it."""

    @property
    def tracking_uri(self) -> str:
        """MLflow tracking URI; empty if the run is not logged."""

    @property
    def data_cpus(self) -> float:
        """Number of logical CPUs that reading data takes in addition to the workers."""

    def describe(self) -> str:
        """Return the plan as text for the terminal."""

    def prepare(self) -> PreparedTask:
        """Prepare the data and resolve the values that depend on them."""

    def summary_table(self, outcome: Mapping[str, Any]) -> str:
        """Return the results of a finished run as text for the terminal."""

    def write_report(self, directory: Path, outcome: Mapping[str, Any], tracked: TrackedRun | None) -> None:
        """Write the plots and pages of a finished run into a directory; `tracked` is None if the run is not logged."""


def data_set(uri: str, digest: str) -> tuple[str, str, str]:
    """Return an entry of `PreparedTask.data_sets`, named by the last part of the URI."""
    return uri.rstrip("/").rsplit("/", 1)[-1], digest, uri


def whole_shape(parameter: Tensor) -> Size:
    """Return the shape of a parameter, also of one that ZeRO 3 has divided, whose own shape is that of a vector."""
    shape: Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def with_and_without_decay(groups: list[ParameterGroup], weight_decay: float) -> list[dict[str, Any]]:
    """Return groups for a PyTorch optimizer, without weight decay for vectors and scalars (biases, norms, φ, b, w3)."""
    result = []
    for group in groups:
        for decay, members in (
            (weight_decay, [parameter for parameter in group["parameters"] if len(whole_shape(parameter)) >= 2]),
            (0.0, [parameter for parameter in group["parameters"] if len(whole_shape(parameter)) < 2]),
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


def trainable(*modules: nn.Module | None) -> list[nn.Parameter]:
    """Return the parameters of the modules that require gradients; None has none."""
    present = [module for module in modules if module is not None]
    return [parameter for module in present for parameter in module.parameters() if parameter.requires_grad]
