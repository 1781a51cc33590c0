"""The configuration that every training run has: one dataclass a section, checked as soon as it is made."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

Section = TypeVar("Section")


def check_positive(section: str, config: Any, *names: str) -> None:
    """Refuse values of a section that are not above 0, or not finite."""
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:  # nor NaN
            raise ValueError(f"{section}.{name} = {value} must be positive" + (" and finite" if value > 0 else ""))


def check_not_negative(section: str, config: Any, *names: str) -> None:
    """Refuse values of a section that are below 0, or not finite."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{section}.{name} = {value} must not be negative" + (" but finite" if value > 0 else ""))


def check_share(section: str, config: Any, *names: str) -> None:
    """Refuse values of a section that are no shares."""
    for name in names:
        value = getattr(config, name)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{section}.{name} = {value:g} must lie in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The run: its name, its directory, its rhythm."""

    name: str
    """Name of the run. Starting a run of this name again continues it."""
    storage: str = ""
    """Directory or pyarrow URI that holds runs, prepared data and the MLflow store. Default: $TEMPNET_HOME, else ./runs."""
    prepared: str = ""
    """Directory or URI of prepared data, which runs share. Default: `prepared` in run.storage."""
    seed: int = 0
    """Seed of the weights, of dropout and of the data order."""
    num_steps: int = 1000
    """Optimizer steps."""
    checkpoint_every: int = 500
    """Steps between checkpoints; one more is written at the end."""
    num_checkpoints_kept: int = 2
    """Older checkpoints are deleted."""
    log_every: int = 10
    """Steps between progress lines and full statistics (losses are logged for every step)."""
    max_restarts: int = 3
    """How often a failed worker group is started again from the last checkpoint."""
    max_wait_minutes: float = 60.0
    """How long to wait for machines with room for all workers, at the start or after one was lost, before giving up."""

    def __post_init__(self) -> None:
        check_positive(
            "run", self, "num_steps", "checkpoint_every", "num_checkpoints_kept", "log_every", "max_wait_minutes"
        )
        check_not_negative("run", self, "seed")
        if not self.name or any(character in self.name for character in "/\\ \t\n") or self.name.startswith("."):
            raise ValueError(f"run.name = {self.name!r} must be a plain file name without spaces or slashes")

    @property
    def resolved_storage(self) -> str:
        """`storage` as an absolute path or a URI.

        Raises:
            ValueError: for a relative path inside the working directory of a submitted job, which Ray deletes.
        """
        storage = (self.storage or os.environ.get("TEMPNET_HOME", "runs")).removeprefix("file://")
        if "://" in storage:
            return storage.rstrip("/")
        path = Path(storage).expanduser()
        if not path.is_absolute() and "runtime_resources" in Path.cwd().parts:
            raise ValueError(
                f"run.storage = {storage!r} is relative to the uploaded working directory of this Ray job, which is "
                "deleted with the Ray session: give an absolute path or a URI that all nodes share, or set TEMPNET_HOME"
            )
        return str(path.resolve())

    @property
    def prepared_directory(self) -> str:
        """Where prepared data lie."""
        return self.prepared or f"{self.resolved_storage}/prepared"

    @property
    def directory(self) -> str:
        """Where this run's checkpoints, export and report go."""
        return f"{self.resolved_storage}/{self.name}"

    @property
    def export_directory(self) -> str:
        """Where the finished model goes: a Transformers directory with `tempnet/` beside it."""
        return f"{self.directory}/export"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """AdamW with a linear warm-up and a decay after it, one pace for the base and one for the TempNet."""

    batch_size: int = 32
    """Blocks (pairs) in the global batch."""
    micro_batch_size: int = 0
    """Blocks (pairs) a worker holds at a time; the rest is accumulated. 0: all of its share."""
    learning_rate_base: float = 6e-4
    learning_rate_tempnet: float = 1e-4
    weight_decay: float = 0.1
    """Of matrices; biases, norms, φ and b have none."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    warmup_share: float = 0.01
    """Share of the steps in which the rate climbs linearly from 0."""
    warmup_share_tempnet: float | None = None
    """Likewise for the TempNet. None: warmup_share."""
    rest_share_tempnet: float = 0.0
    """Share of the steps, before its warm-up, in which the TempNet stays as it is: a base that knows nothing yet has a KL
    near 0, below any ρ, which pushes every τ down."""
    decay: Literal["cosine", "linear"] = "cosine"
    """How the rate falls after the warm-up; linear: slanted triangles."""
    final_share: float = 0.0
    """Share of the rate that is left at the end."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this L2 norm. 0: never."""

    def __post_init__(self) -> None:
        check_positive("optimizer", self, "batch_size", "learning_rate_base", "learning_rate_tempnet", "epsilon")
        check_share("optimizer", self, "beta1", "beta2", "warmup_share", "final_share", "rest_share_tempnet")
        if self.warmup_share_tempnet is not None:
            check_share("optimizer", self, "warmup_share_tempnet")
        warmup = self.warmup_share if self.warmup_share_tempnet is None else self.warmup_share_tempnet
        if self.rest_share_tempnet + warmup > 1.0 or self.rest_share_tempnet == 1.0:
            raise ValueError(
                f"optimizer.rest_share_tempnet = {self.rest_share_tempnet:g} leaves the TempNet no steps after its warm-up "
                f"of {warmup:g}: together they may be 1 at most, and the rest must be below 1"
            )
        check_not_negative("optimizer", self, "micro_batch_size", "weight_decay", "max_grad_norm")
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1.0:
                raise ValueError(f"optimizer.{name} = 1 must be below 1: it would forget nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersSection:
    """Processes, devices and memory."""

    num_workers: int = 1
    """Ray Train workers."""
    use_gpu: bool = False
    """One GPU a worker."""
    cpus_per_worker: float = 1.0
    """Logical CPUs that Ray reserves for a worker; reading data needs some beside them."""
    num_threads: int = 0
    """PyTorch threads of a worker. 0: the cores of the machine shared among the workers; in trials side by side, as many as
    `cpus_per_worker`. What that is at the first start stays while the run has as many workers, as sums depend on it."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO stage."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """bf16: matrix products of the base in bfloat16 by autocast, a frozen base held in bfloat16; all else float32."""
    activation_checkpointing: bool = False
    """Recompute the base's activations in the backward pass."""
    offload_optimizer: bool = False
    """Keep optimizer state in CPU memory (ZeRO 1-3)."""

    def __post_init__(self) -> None:
        check_positive("workers", self, "num_workers", "cpus_per_worker")
        check_not_negative("workers", self, "num_threads")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("workers.offload_optimizer = True needs workers.zero_stage 1, 2 or 3, not 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSection:
    """MLflow."""

    uri: str = field(default="", repr=False)
    """Tracking URI. Default: $MLFLOW_TRACKING_URI, else sqlite in run.storage. A password in it is never shown or recorded;
    give one by the variable, since other users of a machine can read command lines."""
    experiment: str = "language-models"
    """Experiment name."""
    enabled: bool = True
    """Whether anything is logged."""
    optional: bool = False
    """Go on without MLflow where it cannot be reached at the start. Once a run has begun, it never stops one."""
    preset: str = ""
    """The preset that this was made from, as a tag. Presets say it themselves."""
    paper: str = ""
    """What it belongs to in a paper, as the tag paper.table: TempNet, Table 3."""
    system_metrics: bool = True
    """Whether CPU, memory, disk, network and GPUs of the first worker's machine are logged, every 10 s."""
    max_model_gib: float = 1.0
    """An export with a TempNet is copied into MLflow as a model that predicts temperatures. Of a larger one only the TempNet
    is, beside the place where the whole lies. 0: of every one."""

    def __post_init__(self) -> None:
        if not self.max_model_gib >= 0:  # nor NaN
            raise ValueError(f"tracking.max_model_gib = {self.max_model_gib:g} must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class TempNetSection:
    """Sizes and switches of a TempNet; a kind of training adds the loss that it learns by."""

    hidden_size: int = 256
    """d1 of a TempNet."""
    num_prototypes: int = 256
    """d2 of a TempNet."""
    phi_init: float = 1.0
    """Initial φ of the pooling."""
    input_shift: Literal["none", "mean", "max"] = "none"
    """What is subtracted from the logits that a TempNet reads: nothing, the mean of the row or its maximum. A TempNet on
    embeddings takes none only."""
    normalize_input: bool = True
    """Ablation (Table 20)."""
    transform: bool = True
    """Ablation (Table 20)."""
    projection: bool = True
    """Ablation (Table 20)."""
    pooling: Literal["parametric", "linear"] = "parametric"
    """Ablation (Table 20)."""
    depth: Literal[3, 4] = 3
    """Ablation (Tables 21 and 22)."""
    stop_gradient: bool = True
    """Ablation (Table 18)."""

    @property
    def network_options(self) -> dict[str, Any]:
        """The fields above, as a `TempNetConfig` takes them."""
        return {option.name: getattr(self, option.name) for option in dataclasses.fields(TempNetSection)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SteeredTempNetSection(TempNetSection):
    """A TempNet whose ρ may be steered."""

    target_tau: float | None = None
    """Steer ρ during training so that the mean temperature goes to this and stays there; rho is then where it starts. For
    joint training, where the mean is a gauge. While the TempNet rests, and for None, ρ stays as it is."""
    rho_gain: float = 5.0
    """κ: the nats by which ρ answers a mean temperature that is off by a factor of e."""

    def check_steering(self, *, has_learned_rho: bool, tau_min: float, tau_max: float) -> None:
        """Refuse a target that the loss cannot be steered to.

        Args:
            has_learned_rho: whether the loss is a robust one with a TempNet.

        Raises:
            ValueError: naming the field, the value and what is legal.
        """
        check_positive("temperature", self, "rho_gain")
        if self.target_tau is None:
            return
        if not has_learned_rho:
            raise ValueError(
                f"temperature.target_tau = {self.target_tau:g} steers the ρ of a robust loss with TempNets: choose "
                "temperature.loss dro (language models) or tempnet (contrastive), or None"
            )
        if not tau_min < self.target_tau < tau_max:
            raise ValueError(
                f"temperature.target_tau = {self.target_tau:g} must lie between τ₀ = {tau_min:g} and τ_max = {tau_max:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSection:
    """The encoder: weights to start from, or sizes to start at random."""

    path: str = ""
    """A Transformers encoder: directory or hub name. Empty: a random RoBERTa of the sizes below."""
    hidden_size: int = 768
    num_layers: int = 6
    num_heads: int = 12
    dropout: float = 0.1
    """Of a random RoBERTa."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Transformers' attention; eager is the faster one for short spans on CPUs."""

    def __post_init__(self) -> None:
        check_positive("model", self, "hidden_size", "num_layers", "num_heads")
        check_share("model", self, "dropout")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size = {self.hidden_size} is not divisible by model.num_heads = {self.num_heads}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSection:
    """Scores on held-out data."""

    every: int = 500
    """Steps between validations; one more at the end."""

    def __post_init__(self) -> None:
        check_positive("validation", self, "every")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """What the loop and the driver read of a run, whatever is trained; the kinds of training add their sections."""

    run: RunSection
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    workers: WorkersSection = field(default_factory=WorkersSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    tracking: TrackingSection = field(default_factory=TrackingSection)

    def __post_init__(self) -> None:
        size, workers = self.optimizer.batch_size, self.workers.num_workers
        if size % workers:
            raise ValueError(
                f"optimizer.batch_size = {size} is not divisible by workers.num_workers = {workers}: "
                f"choose a multiple of {workers}"
            )
        if size // workers % self.micro_batch_size:
            raise ValueError(
                f"a worker's share of the batch, {size // workers}, is not divisible by "
                f"optimizer.micro_batch_size = {self.micro_batch_size}"
            )

    @property
    def micro_batch_size(self) -> int:
        """What a worker holds of a batch at a time."""
        return self.optimizer.micro_batch_size or max(1, self.optimizer.batch_size // self.workers.num_workers)

    @property
    def num_accumulation_steps(self) -> int:
        """Micro-batches a worker runs for one optimizer step."""
        return self.optimizer.batch_size // self.workers.num_workers // self.micro_batch_size


def absolute_path(value: str) -> str:
    """A local path made absolute, for the workers, whose working directory is another; URIs and hub names stay."""
    return str(Path(value).resolve()) if value and "://" not in value and Path(value).exists() else value


def with_absolute_fields(section: Section, *names: str) -> Section:
    """A section of a configuration with :func:`absolute_path` of the fields that are named."""
    return dataclasses.replace(section, **{name: absolute_path(getattr(section, name)) for name in names})  # type: ignore[type-var]
