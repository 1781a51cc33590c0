"""A kind of training: what it is on the driver (`Plan`) and on a worker (`Task`), with what all kinds have in common.

After the driver's `Plan` has prepared the data, every worker gets a `CreateTask`, by which it creates its `Task`.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn
from torch.optim import Optimizer

from jobs.engine.config import TrainingConfig
from jobs.engine.fields import configuration_hash
from jobs.engine.hardware import describe_memory, training_memory
from jobs.engine.masking import masked
from jobs.engine.metrics import TrackedRun
from jobs.engine.report import draw_curves, draw_histogram, results
from jobs.engine.resumption import FatalTrainingError
from pipelines.plan import StreamPlan
from pipelines.storage import write_json
from pipelines.stream import READ_CPUS, Batch, RankStream, Source
from tempnet.base_model import BaseReference, read_reference
from tempnet.contrastive.state import SampleState
from tempnet.controllers import RhoController

if TYPE_CHECKING:  # the driver does not need DeepSpeed at run time
    from deepspeed import DeepSpeedEngine

Config = TypeVar("Config", bound=TrainingConfig)

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


_STATE_FILE = "rho.json"


class RhoSteering:
    """Sets the ρ of every step, the same on all ranks; without a target for the mean temperature, ρ stays constant.

    Adjusting ρ costs one transfer from the device to the host per step.
    """

    def __init__(
        self,
        *,
        target: float | None,
        gain: float,
        rho: float,
        limit: float,
        tau_range: tuple[float, float],
        apply: Callable[[float], None],
    ) -> None:
        self._controller: RhoController | None = None
        self._tau_range, self._apply = tau_range, apply
        if target is not None:
            self._controller = RhoController(rho, target=target, limit=limit, gain=gain)

    def follows(self, optimizer: Optimizer, run: int = 0) -> bool:
        """Return whether to :meth:`observe` the coming step of a run: it has a target, and its TempNet does not rest."""
        own = [group for group in optimizer.param_groups if group.get("run", 0) == run]
        return self._controller is not None and any(group["lr"] for group in own if group.get("name") == "tempnet")

    def observe(self, tau: Tensor, slope: Tensor) -> None:
        """Update ρ from the temperatures of a step, and set the loss's ρ for the next one. All ranks must call this.

        τ is a sigmoid of the network's score s, and near an end of its range hardly responds to its slope. Slopes are
        therefore averaged with the weights dτ/ds ∝ (τ − τ₀)(τ_max − τ).
        """
        assert self._controller is not None
        low, high = self._tau_range
        tau, slope = tau.detach().double(), slope.detach().double()
        follows = (tau - low) * (high - tau) + 1e-6 * (high - low) ** 2
        sums = torch.stack([tau.sum(), tau.new_tensor(tau.numel()), (follows * slope).sum(), follows.sum()])
        dist.all_reduce(sums)
        total, count, push, weight = sums.tolist()
        if count:
            self._apply(self._controller.update(total / count, push / weight))

    def scores(self) -> dict[str, float]:
        """Return the current ρ as a metric; empty if ρ is constant."""
        return {"rho": self._controller.rho} if self._controller else {}

    def save(self, directory: Path) -> None:
        """Write the controller's state into a checkpoint directory; every rank writes the same content."""
        if self._controller:
            (directory / _STATE_FILE).write_text(json.dumps(self._controller.state()))

    def load(self, directory: Path) -> None:
        """Restore the controller's state, unless it is of a run whose ρ was constant, and set the loss's ρ."""
        if self._controller and (file := directory / _STATE_FILE).exists():
            self._controller.restore(json.loads(file.read_text()))
            self._apply(self._controller.rho)


class Task(ABC, Generic[Config]):
    """A task on one worker: its data, its model, and how to train, validate, save and export it.

    By default a unit is a sample, the FLOPs are unknown, and the last model is exported.

    Args:
        config: configuration of the run, with absolute paths and all defaults resolved.
        source: the training data.
        plan: order in which the samples are visited.
        rank: rank of this worker.
        world_size: number of workers.
        reading: further fields of `pipelines.stream.RankStream`, which say how the data are read.
    """

    unit: str
    """Name of the units in which the speed is counted, such as `tokens` or `pairs`."""
    module: Any
    """The module that DeepSpeed trains; :meth:`build` sets it."""
    base: BaseReference | None = None
    """The frozen base; None if there is none."""
    steering: RhoSteering | None = None
    """Adjusts ρ; None if the loss has none."""
    is_compiled: bool = False
    """Whether the first step compiles blocks of the base."""
    number: int = 0
    """Number of this run among those that train together."""
    member_configs: Sequence[Config] = ()
    """Configurations of the runs that train together; empty if this is the only one."""

    def __init__(
        self, config: Config, source: Source, *, plan: StreamPlan, rank: int, world_size: int, **reading: Any
    ) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self.members: Sequence[Any] = [self]
        size = config.optimizer.batch_size
        self.stream = RankStream(source=source, plan=plan, batch_size=size, rank=rank, world_size=world_size, **reading)

    def make_members(self) -> Sequence[Any]:
        """Make the tasks of the runs that train together: copies of this one, which share all that it has read so far."""
        if self.member_configs:
            self.members = [copy.copy(self) for _ in self.member_configs]
            for number, (member, config) in enumerate(zip(self.members, self.member_configs, strict=True)):
                member.config, member.number = config, number
        return self.members

    @property
    def sample_state(self) -> SampleState | None:
        """What the loss remembers of every sample; None if it remembers nothing."""
        return None

    @abstractmethod
    def build(self, *, is_fresh: bool) -> None:
        """Build the module, with the same weights on every rank, and read the validation data.

        Reading of the training data has already begun by then.
        """

    @abstractmethod
    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the trainable parameters, in one group for each learning rate and schedule."""

    def flops_per_unit(self) -> float | None:
        """Return the FLOPs that training on one unit mathematically needs; None if unknown."""
        return None

    def num_units(self, batch: Batch) -> int:
        """Return the number of units in this rank's part of a batch."""
        return len(batch["digest"])  # Every source returns digests (`pipelines.stream.Source`).

    @abstractmethod
    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        """Run the forward pass, the backward pass and the optimizer step number `step`, counted from 0.

        `num_units` is the number of units in the global batch; `batch` is this rank's part of it.
        """

    @abstractmethod
    def validate(
        self, engine: DeepSpeedEngine, *, with_details: bool
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return the scores, equal on all ranks, and with details on rank 0 what the report needs."""

    def validate_members(
        self, members: Sequence[Any], engine: DeepSpeedEngine, *, with_details: bool
    ) -> list[tuple[dict[str, float], dict[str, Any] | None]]:
        """Return what :meth:`validate` returns, for some of the members."""
        return [member.validate(engine, with_details=with_details) for member in members]

    @abstractmethod
    def describe(self, scores: Mapping[str, float]) -> str:
        """Format scores as a short text for a progress line."""

    def rating(self, scores: Mapping[str, float]) -> float | None:
        """Return the rating by which the best model is exported (higher is better); None: the last model is exported."""
        return None

    @abstractmethod
    def export(self) -> None:
        """Write the model to the directory `export` of the run; all ranks call this, rank 0 writes."""

    def save(self, directory: Path) -> None:
        """Save what DeepSpeed does not: ρ if it is adjusted, the state of this rank's samples, the name of a frozen base."""
        if self.steering is not None:
            self.steering.save(directory)
        if self.sample_state is not None:
            self.sample_state.save(directory)
        if self.base is not None and self.rank == 0:
            self.base.save(directory)

    def load(self, directory: Path, num_writers: int) -> None:
        """Load what :meth:`save` wrote, whatever number of workers wrote it; another frozen base is a FatalTrainingError."""
        if self.base is not None and (written_on := read_reference(directory)) is not None:
            try:
                written_on.check(self.base.digest)
            except ValueError as error:
                raise FatalTrainingError(str(error)) from error
        if self.steering is not None:
            self.steering.load(directory)
        if self.sample_state is not None:
            self.sample_state.load(directory, num_writers)


CreateTask: TypeAlias = Callable[[int, int], Task]
"""A function that creates the task on a worker from its rank and the number of workers, such as a `functools.partial`.

It must be fast, because reading data starts only afterwards, and it imports the task's module itself, which loads DeepSpeed.
"""


def create_members(
    create_task: CreateTask, configs: Sequence[TrainingConfig], group: TrainingConfig, rank: int, world_size: int
) -> Task:
    """Create the task of several runs that train side by side: that of any of them, which makes the others later."""
    created = create_task(rank, world_size)
    task: Any = created
    micro_batch_size = created.config.optimizer.micro_batch_size  # which the task may have chosen by its free memory
    task.config, *task.member_configs = (
        # The networks are small; DeepSpeed, which has one norm of all gradients under ZeRO, divides nothing.
        replace(one, workers=replace(one.workers, zero_stage=0, offload_optimizer=False, num_workers=world_size))
        for one in (run.with_micro_batch_size(micro_batch_size) for run in (group, *configs))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ABC, Generic[Config]):
    """A task in the driver: everything that follows from a configuration before anything is started.

    By default there is one reader for every worker, and plots are made of what was measured.
    """

    config: Config
    """Configuration as the user gave it."""
    tracking_uri: str
    """MLflow tracking URI; empty if the run is not logged."""

    unit: ClassVar[str] = ""
    """Name of the units in which the speed is counted, such as pairs."""
    curves: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Title of every panel of `curves.png` → the metrics that it shows."""
    band: ClassVar[tuple[float, float] | None] = None
    """Range of mean τ that `histogram.png` marks."""

    @property
    def data_cpus(self) -> float:
        """Number of logical CPUs that reading data takes in addition to the workers."""
        return READ_CPUS * self.config.workers.max_workers

    @abstractmethod
    def describe(self) -> str:
        """Return the plan as text for the terminal."""

    def describe_lines(
        self,
        *,
        about: Mapping[str, str],
        num_units: int,
        readers: str = "",
        parameters: str,
        num_trained: int,
        num_frozen: int = 0,
        notes: Iterable[str] = (),
        memory: Mapping[str, float] | None = None,
    ) -> str:
        """Format the plan: lines that every kind of training has, and those about this one.

        `num_units` is the number of units of a batch; `memory` replaces what follows from the numbers of parameters.
        """
        config, run, workers = self.config, self.config.run, self.config.workers
        state = training_memory(workers, num_trained=num_trained, num_frozen=num_frozen)
        lines = {
            "run": f"{run.name} in {run.directory} (configuration {configuration_hash(config)})",
            **about,
            "steps": f"{run.num_steps} = {run.num_steps * num_units:,} {self.unit}; checkpoint every {run.checkpoint_every}, "
            f"validation every {config.validation.every}",
            "workers": f"{workers.num_workers} × {'1 GPU' if workers.use_gpu else 'CPU'}, ZeRO {workers.zero_stage}, "
            f"{workers.resolved_precision}{', in this process' if workers.local else readers}",
            "parameters": parameters,
            "memory": describe_memory(memory) if memory else f"{describe_memory(state)}; activations are not counted",
            "MLflow": masked(self.tracking_uri) or "off",
        }
        rows = [*lines.items(), *(("note", note) for note in notes)]
        return "\n".join(f"{name:<13}{line}" for name, line in rows)

    @abstractmethod
    def prepare(self) -> PreparedTask:
        """Prepare the data and resolve the values that depend on them."""

    def prepare_with_room(self) -> PreparedTask:
        """Prepare the data, as soon as it is certain that Ray has room for the run; it is started if the run needs it."""
        if not self.config.workers.local:
            from jobs.engine import cluster

            cluster.start_ray()
            cluster.check_run(self.config, self.data_cpus)
        return self.prepare()

    def rows(self, outcome: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return name and text of the results that only this kind of training has."""
        raise NotImplementedError

    def summary_table(self, outcome: Mapping[str, Any]) -> str:
        """Return the results of a finished run as text for the terminal."""
        return results(self.rows(outcome), outcome, self.unit)

    def write_report(self, directory: Path, outcome: Mapping[str, Any], tracked: TrackedRun | None) -> None:
        """Write `histogram.png`, if temperatures differ, and `curves.png`, if the run is logged, into a directory."""
        if outcome.get("histograms"):
            draw_histogram(directory / "histogram.png", outcome, band=self.band)
        if tracked and self.curves:
            draw_curves(directory / "curves.png", tracked, self.curves, f"{outcome['run']}: {outcome['loss']}")


def data_set(uri: str, digest: str) -> tuple[str, str, str]:
    """Return an entry of `PreparedTask.data_sets`, named by the last part of the URI."""
    return uri.rstrip("/").rsplit("/", 1)[-1], digest, uri


def data_sets(data: Any, train: Any, validation: Any) -> dict[str, tuple[str, str, str]]:
    """Return `PreparedTask.data_sets` of a section `data` and of the manifests of its two texts, or sets of images."""
    held_out = data.validation or data.train
    return {"training": data_set(data.train, train.digest), "validation": data_set(held_out, validation.digest)}


def whole_shape(parameter: Tensor) -> Size:
    """Return the shape of a parameter, also of one that ZeRO 3 has divided, whose own shape is that of a vector."""
    shape: Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def with_and_without_decay(groups: list[ParameterGroup], weight_decay: float) -> list[dict[str, Any]]:
    """Return groups for a PyTorch optimizer, without weight decay for vectors and scalars (biases, norms, φ, b, w3)."""
    result = []
    for group in groups:
        for is_matrix in (True, False):
            members = [one for one in group["parameters"] if (len(whole_shape(one)) >= 2) == is_matrix]
            own = {"name": group["name"], "params": members, "lr": group["learning_rate"]}
            if members:
                result.append({**own, "weight_decay": weight_decay if is_matrix else 0.0})
    return result


def trainable(*modules: nn.Module | None) -> list[nn.Parameter]:
    """Return the parameters of the modules that require gradients; None has none."""
    present = [module for module in modules if module is not None]
    return [parameter for module in present for parameter in module.parameters() if parameter.requires_grad]
