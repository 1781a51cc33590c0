"""What the configurations of all scoring jobs share: the pool of workers, and name and place of an evaluation."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from importlib.util import find_spec
from typing import Any, Literal

from jobs.engine.config import RunSection, TrackingSection
from jobs.engine.fields import FREE_TO_CHANGE, check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSection:
    """Number and resources of the worker processes; results do not depend on them."""

    num_workers: int = field(default=1, metadata=FREE_TO_CHANGE)
    """Number of worker processes, each of which holds one model at a time."""
    use_gpu: bool = False
    """Reserve one GPU for every worker. False: workers run on CPUs."""
    cpus_per_worker: float = field(default=1.0, metadata=FREE_TO_CHANGE)
    """CPUs that Ray reserves for every worker; also its number of PyTorch threads. Reading data needs half a CPU more."""

    def __post_init__(self) -> None:
        check_positive("workers", self, "num_workers", "cpus_per_worker")

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that Ray reserves for every worker."""
        return int(self.use_gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelPool(PoolSection):
    """Workers whose language model may be spread over several GPUs of a node."""

    device_map: Literal["auto"] | None = None
    """auto: spread the layers over the GPUs of a worker and the CPU's memory. None: the model is on one device."""
    gpus_per_worker: int = 1
    """Number of GPUs that Ray reserves for every worker with `use_gpu`; more than one need `device_map = auto`."""

    def __post_init__(self) -> None:
        PoolSection.__post_init__(self)
        if self.gpus_per_worker < 1 or (self.gpus_per_worker > 1 and not (self.use_gpu and self.device_map)):
            raise ValueError(
                f"workers.gpus_per_worker = {self.gpus_per_worker} must be 1, or more with workers.use_gpu and "
                "workers.device_map = auto: a model that is not spread uses one GPU"
            )

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that Ray reserves for every worker."""
        return self.gpus_per_worker if self.use_gpu else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """The fields of every job that has one directory of results and an MLflow store elsewhere."""

    output: str
    """Directory or URI of results.json, results.md, a picture, and what is kept so that a repeated run computes only what is
    missing."""
    storage: str = ""
    """Directory or URI of the MLflow store. Default: $TEMPNET_HOME, else ./runs."""
    tracking: TrackingSection = field(default_factory=TrackingSection)

    def __post_init__(self) -> None:
        check_named(self, "output")
        _ = self.run.resolved_storage

    @property
    def run(self) -> RunSection:
        """The storage as the section that training runs use, checked by the same rules."""
        return RunSection(name="scoring", storage=self.storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """The fields of every evaluation; a subclass adds what is evaluated."""

    models: tuple[str, ...]
    """Directories, URIs or hub names of the models."""
    name: str = "evaluation"
    """Name of the evaluation; also the name of its directory in storage, which keeps finished units and the results."""
    storage: str = ""
    """Directory or URI of evaluations, prepared data and the MLflow store. Default: $TEMPNET_HOME, else ./runs."""
    workers: PoolSection = field(default_factory=PoolSection)
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="evaluation"))

    def __post_init__(self) -> None:
        check_named(self)
        _ = self.run.resolved_storage

    @property
    def run(self) -> RunSection:
        """Name and storage as the section that training runs use, checked by the same rules."""
        return RunSection(name=self.name, storage=self.storage)


def check_named(config: Any, *names: str) -> None:
    """Check that the fields without a default, and those named, are not empty (ValueError)."""
    for item in fields(config):
        is_required = item.default is MISSING and item.default_factory is MISSING
        if (is_required or item.name in names) and not getattr(config, item.name):
            raise ValueError(f"{item.name} is empty: it must name something")


def check_least(config: object, **least: int) -> None:
    """Check that fields are at least as large as given (ValueError)."""
    for name, lowest in least.items():
        if not getattr(config, name) >= lowest:
            raise ValueError(f"{name} = {getattr(config, name)} must be at least {lowest}")


def check_precision(name: str, value: str) -> None:
    """Check that torchao is there if weights are to be held in eight bits (ValueError)."""
    if value in ("int8", "fp8") and find_spec("torchao") is None:
        raise ValueError(f"{name} = {value} needs torchao, which is not installed: pip install 'torchao>=0.18'")


def check_share(name: str, value: float) -> None:
    """Check that a share lies in [0, 1] (ValueError)."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} = {value:g} must lie in [0, 1]")
