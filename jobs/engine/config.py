"""The configuration that every training run has: one dataclass for each section, validated when it is created."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

from jobs.engine.fields import (
    FREE_TO_CHANGE,
    PATH,
    added_later,
    check_not_negative,
    check_positive,
    check_share,
    stands_for,
)
from jobs.engine.masking import masked

# Trials and files add to the name of a run, and a name has at most 255 bytes on most file systems.
_MAX_NAME_BYTES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The run: its name, its directories, its length, and how often it logs and saves."""

    name: str
    """Name of the run, and of its directory in run.storage. Starting a run of the same name again continues it."""
    storage: str = field(default="", metadata=FREE_TO_CHANGE)
    """Directory or pyarrow URI that holds the runs, the prepared data and the MLflow database. If empty: $TEMPNET_HOME,
    else ./runs."""
    prepared: str = field(default="", metadata=FREE_TO_CHANGE)
    """Directory or URI of prepared data, which several runs can share. If empty: the directory `prepared` in run.storage."""
    export: str = field(default="", metadata=FREE_TO_CHANGE)
    """Directory or URI of the exported model. If empty: the directory `export` of the run."""
    seed: int = 0
    """Random seed of the initial weights, dropout and the order of the data."""
    num_steps: int = 1000
    """Number of optimizer steps."""
    start_from: str = field(default="", metadata=added_later(""))
    """NAME@STEP: a run in run.storage and the step of one of its checkpoints, after which this run goes on, with values of
    its own. If empty: the run starts at step 0."""
    checkpoint_every: int = field(default=500, metadata=FREE_TO_CHANGE)
    """Steps between checkpoints; one more is written after the last step."""
    num_checkpoints_kept: int = field(default=2, metadata=FREE_TO_CHANGE)
    """Number of most recent checkpoints to keep; older ones are deleted."""
    log_every: int = field(default=10, metadata=FREE_TO_CHANGE)
    """Steps between progress lines and full statistics. The loss is logged for every step."""
    max_restarts: int = field(default=3, metadata=FREE_TO_CHANGE)
    """How many times a failed group of workers is restarted from the last checkpoint before the run fails."""
    max_wait_minutes: float = field(default=60.0, metadata=FREE_TO_CHANGE)
    """Minutes to wait for room for all workers, at the start or after a machine is lost, before the run fails."""

    max_stall_minutes: float = field(default=0.0, metadata=FREE_TO_CHANGE)
    """Minutes without a step, a long validation among them, after which the run fails; it can be continued. 0: it waits
    without limit. After a minute the workers are named with what they do, whatever this says."""
    grace_seconds: float = field(default=30.0, metadata=FREE_TO_CHANGE)
    """Seconds that a job has after SIGTERM to save the step that it is at. 0: it ends at once."""

    def __post_init__(self) -> None:
        check_positive(
            "run", self, "num_steps", "checkpoint_every", "num_checkpoints_kept", "log_every", "max_wait_minutes"
        )
        check_not_negative("run", self, "seed", "grace_seconds", "max_stall_minutes")
        is_start = not self.start_from or re.fullmatch(r"[^/\\\s]+@[1-9]\d*", self.start_from)
        if not is_start or self.start_step >= self.num_steps:
            raise ValueError(
                f"run.start_from = {self.start_from!r} must be NAME@STEP, a run and a step before run.num_steps = "
                f"{self.num_steps}"
            )
        if not self.name or any(character in self.name for character in "/\\ \t\n") or self.name.startswith("."):
            raise ValueError(f"run.name = {self.name!r} must be a plain file name without spaces or slashes")
        if len(os.fsencode(self.name)) > _MAX_NAME_BYTES or not self.name.isprintable():
            raise ValueError(
                f"run.name = {self.name[:40]!r}… must be a plain file name of at most {_MAX_NAME_BYTES} bytes, all printable"
            )

    @property
    def start_step(self) -> int:
        """Number of the steps that another run has made before this one begins."""
        return int(self.start_from.rpartition("@")[2] or 0)

    @property
    def resolved_storage(self) -> str:
        """`storage` as an absolute path or a URI."""
        return resolve_directory("run.storage", self.storage or os.environ.get("TEMPNET_HOME", "runs"))

    @property
    def resolved(self) -> Self:
        """The section with absolute paths or URIs, for workers, which have another working directory."""
        return replace(
            self,
            storage=self.resolved_storage,
            prepared=self.prepared and self.prepared_directory,
            export=self.export and self.export_directory,
        )

    @property
    def prepared_directory(self) -> str:
        """Directory or URI of the prepared data."""
        if self.prepared:
            return resolve_directory("run.prepared", self.prepared)
        return f"{self.resolved_storage}/prepared"

    @property
    def directory(self) -> str:
        """Directory or URI of this run: its checkpoints, export and report."""
        return f"{self.resolved_storage}/{self.name}"

    @property
    def export_directory(self) -> str:
        """Directory or URI of the exported model: a Transformers directory that also contains the TempNet in `tempnet/`."""
        return resolve_directory("run.export", self.export) if self.export else f"{self.directory}/export"


def resolve_directory(field: str, place: str) -> str:
    """Return a directory that a field names as an absolute path or a URI; ValueError if it cannot be used or kept."""
    place = place.removeprefix("file://")
    if "://" in place:
        if "?" in place:
            raise ValueError(
                f"{field} = {masked(place)!r} must have no query: set AWS_ENDPOINT_URL and AWS_DEFAULT_REGION on every node"
            )
        return place.rstrip("/")
    path = Path(place).expanduser()
    if not path.is_absolute() and "runtime_resources" in Path.cwd().parts:
        raise ValueError(
            f"{field} = {place!r} is relative to the uploaded working directory of this Ray job, which is deleted with "
            "the Ray session: give an absolute path or a URI that all nodes share"
            + (", or set TEMPNET_HOME" if field == "run.storage" else "")
        )
    return str(path.resolve())


_RANGE = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersSection:
    """Worker processes, and how they use devices and memory."""

    local: bool = field(default=False, metadata=FREE_TO_CHANGE)
    """Train with one worker in the process of the command, without Ray: for debuggers, profilers and small machines. Files,
    results and how a run goes on are the same; a failed run is not restarted."""
    num_workers: int | str = field(default=1, metadata=FREE_TO_CHANGE)
    """Number of Ray Train workers. MIN:MAX: as many as the cluster has room for; the run goes on with fewer when a node is
    lost, and with more when one comes. Numbers between the two that do not divide the batch are left out."""
    use_gpu: bool = False
    """Whether every worker uses one GPU; otherwise workers compute on CPUs."""
    cpus_per_worker: float = field(default=1.0, metadata=FREE_TO_CHANGE)
    """Logical CPUs that Ray reserves for each worker. Reading data takes further CPUs."""
    num_threads: int = 0
    """PyTorch threads of each worker. 0: an equal share of the machine's cores, or `cpus_per_worker` threads in trials
    that run side by side. The number chosen at the first start is kept while the number of workers stays the same,
    because the rounding of sums depends on it."""
    placement: Literal["pack", "spread"] = field(default="pack", metadata=FREE_TO_CHANGE)
    """pack: workers on as few nodes as possible, which exchange gradients fastest. spread: on as many as possible."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """Stage of DeepSpeed ZeRO: 0 partitions nothing, 1 the optimizer state, 2 also the gradients, 3 also the weights."""
    precision: Literal["auto", "fp32", "bf16"] = field(default="auto", metadata=stands_for("resolved_precision"))
    """fp32: everything in float32. bf16: matrix products of the base model in bfloat16 by autocast, a frozen base model
    stored in bfloat16, everything else in float32. auto: bf16 on GPUs and on CPUs with instructions for it, else fp32."""
    activation_checkpointing: bool = False
    """Save memory by recomputing the base model's activations in the backward pass."""
    compile: Literal["auto", "on", "off"] = field(default="auto", metadata=FREE_TO_CHANGE)
    """on: the base's transformer blocks are compiled by torch.compile in the first step, which takes one to two minutes; the
    result is kept in `compiled` beside the prepared data. Losses differ by rounding. auto: on for language models on GPUs,
    else off. ZeRO 3 gathers the weights of a compiled block at once, not layer by layer."""
    micro_batch: Literal["given", "auto"] = field(default="given", metadata=FREE_TO_CHANGE)
    """given: a worker processes `optimizer.micro_batch_size` samples at a time. auto: as many as the memory that is free when
    it starts has room for, by the arithmetic of `jobs.engine.hardware` (language models). Losses differ by rounding."""
    offload_optimizer: bool = False
    """Keep the optimizer state in CPU memory. Needs ZeRO stage 1, 2 or 3."""
    memory_gib: float | None = field(default=None, metadata=FREE_TO_CHANGE)
    """Memory that a worker may take, in GiB: that of its GPU, else of its process. A run that needs more by the arithmetic
    of `jobs.engine.hardware` is refused (language models). None: unlimited."""

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, int):
            check_positive("workers", self, "num_workers")
        elif not (match := _RANGE.fullmatch(self.num_workers)) or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(
                f"workers.num_workers = {self.num_workers!r} must be a number, or MIN:MAX with 1 <= MIN <= MAX, such as 2:8"
            )
        if self.local and self.num_workers != 1:
            raise ValueError(
                f"workers.num_workers = {self.num_workers} must be 1 with workers.local = True, which trains in one process"
            )
        check_positive("workers", self, "cpus_per_worker")
        check_not_negative("workers", self, "num_threads")
        if self.memory_gib is not None:
            check_positive("workers", self, "memory_gib")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("workers.offload_optimizer = True needs workers.zero_stage 1, 2 or 3, not 0")

    @property
    def compiles(self) -> bool:
        """Whether the transformer blocks of a language model are compiled, unless their results are read instead."""
        return self.compile == "on" or (self.compile == "auto" and self.use_gpu)

    @property
    def min_workers(self) -> int:
        """The smallest number of workers with which the run trains."""
        return int(str(self.num_workers).partition(":")[0])

    @property
    def max_workers(self) -> int:
        """The largest number of workers, with which the run trains if the cluster has room for them."""
        return int(str(self.num_workers).rpartition(":")[2])

    @property
    def resolved_precision(self) -> Literal["fp32", "bf16"]:
        """The precision, which `auto` leaves to the machine that starts the run: bf16 on GPUs, and on CPUs that compute it.

        A CPU without instructions for it takes three to four times as long for bfloat16 products as for float32.
        """
        if self.precision != "auto":
            return self.precision
        if self.use_gpu:
            return "bf16"
        from torch import cpu  # here, because configurations are read before torch is needed

        return "bf16" if cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported() else "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """AdamW with a linear warm-up followed by a decay, with separate learning rates for the base model and the TempNet."""

    batch_size: int = 32
    """Number of samples (blocks of tokens, images, pairs, documents) in the global batch of all workers."""
    micro_batch_size: int = 0
    """Samples that a worker processes at a time; it accumulates gradients over its share of the batch. 0: the whole
    share at once."""
    learning_rate_base: float = 6e-4
    """Peak learning rate of the base model."""
    learning_rate_tempnet: float = 1e-4
    """Peak learning rate of the TempNet."""
    weight_decay: float = 0.1
    """Weight decay of matrices. Vectors and scalars (biases, norms, φ, b) are not decayed."""
    beta1: float = 0.9
    """AdamW's β₁, below 1."""
    beta2: float = 0.95
    """AdamW's β₂, below 1."""
    epsilon: float = 1e-8
    """AdamW's ε."""
    warmup_share: float = 0.01
    """Share of the steps, in [0, 1], over which the learning rate rises linearly from 0 to its peak."""
    warmup_share_tempnet: float | None = None
    """Share of the steps, in [0, 1], over which the learning rate of the TempNet rises linearly. None: same as
    warmup_share."""
    rest_share_tempnet: float = 0.0
    """Share of the steps, before its warm-up, during which the TempNet is not updated. An untrained base model has a KL
    near 0, below any ρ, which would push every τ down."""
    decay: Literal["cosine", "linear"] = "cosine"
    """Shape of the learning-rate decay after the warm-up: half a cosine, or linear (the slanted triangle)."""
    final_share: float = 0.0
    """Learning rate at the last step, as a share of the peak, in [0, 1]."""
    max_grad_norm: float = 1.0
    """Maximum L2 norm to which gradients are clipped. 0: no clipping."""

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
class TrackingSection:
    """Logging to MLflow."""

    uri: str = field(default="", repr=False, metadata=FREE_TO_CHANGE)
    """MLflow tracking URI. If empty: $MLFLOW_TRACKING_URI, else an SQLite database in run.storage. A password in the
    URI is never shown or recorded; pass it by the environment variable, because other users of the machine can read
    command lines."""
    experiment: str = "language-models"
    """Name of the MLflow experiment."""
    enabled: bool = field(default=True, metadata=FREE_TO_CHANGE)
    """Whether the run is logged to MLflow."""
    optional: bool = field(default=False, metadata=FREE_TO_CHANGE)
    """Train without MLflow if it cannot be reached at the start, instead of refusing to start. A run that has started
    is never stopped by an MLflow outage, whatever this says."""
    preset: str = field(default="", metadata=FREE_TO_CHANGE)
    """Name of the preset that the configuration was made from, logged as the tag `preset`. Presets set it themselves."""
    paper: str = field(default="", metadata=FREE_TO_CHANGE)
    """Table of a paper that the run belongs to, logged as the tag `paper.table`, for example: TempNet, Table 3."""
    system_metrics: bool = field(default=True, metadata=FREE_TO_CHANGE)
    """Whether to log CPU, memory, disk, network and GPU usage of the first worker's machine every 10 s."""
    max_model_gib: float = field(default=1.0, metadata=FREE_TO_CHANGE)
    """Largest export, in GiB, that is copied into MLflow as a model that predicts temperatures. Of a larger export,
    MLflow gets only the TempNet and the path of the whole export. 0: always only the TempNet."""

    def __post_init__(self) -> None:
        if not self.max_model_gib >= 0:  # also refuses NaN
            raise ValueError(f"tracking.max_model_gib = {self.max_model_gib:g} must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSection:
    """The encoder: pretrained weights to start from, or the sizes of a randomly initialised one."""

    path: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of a Transformers encoder. If empty: a randomly initialised RoBERTa of the sizes below."""
    hidden_size: int = 768
    """Hidden size of the random RoBERTa; must be a multiple of num_heads. Ignored if path is given."""
    num_layers: int = 6
    """Number of layers of the random RoBERTa. Ignored if path is given."""
    num_heads: int = 12
    """Number of attention heads of the random RoBERTa. Ignored if path is given."""
    dropout: float = 0.1
    """Dropout probability of the random RoBERTa. Ignored if path is given."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of Transformers. `eager` is the faster one for short texts on CPUs."""

    def __post_init__(self) -> None:
        check_positive("model", self, "hidden_size", "num_layers", "num_heads")
        check_share("model", self, "dropout")
        if not self.path and self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size = {self.hidden_size} is not divisible by model.num_heads = {self.num_heads}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSection:
    """Validation on held-out data."""

    every: int = 500
    """Steps between validations; one more takes place after the last step."""

    def __post_init__(self) -> None:
        check_positive("validation", self, "every")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The sections that the training loop and the driver read; every task adds its own sections in a subclass."""

    accumulates_gradients: ClassVar[bool] = False
    """Whether a worker may process its share of a batch in micro-batches."""
    has_blocks: ClassVar[bool] = False
    """Whether the base has transformer blocks that can be compiled, and whose memory is known beforehand."""

    run: RunSection
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    workers: WorkersSection = field(default_factory=WorkersSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    tracking: TrackingSection = field(default_factory=TrackingSection)

    def __post_init__(self) -> None:
        if self.workers.local:
            data = getattr(self, "data", None)  # a section of the task
            for name, needed in (("prepare", "ahead"), ("reader_resources", ())):
                if (value := getattr(data, name, needed)) != needed:
                    raise ValueError(
                        f"data.{name} = {value!r} needs Ray, which workers.local = True does without: choose {needed!r}"
                    )
        size, micro = self.optimizer.batch_size, self.optimizer.micro_batch_size
        if self.workers.micro_batch == "auto" and (micro or not self.accumulates_gradients):
            fixed = f"optimizer.micro_batch_size = {micro}, which auto chooses; give 0"
            fixed = fixed if micro else "a task without micro-batches"
            raise ValueError(f"workers.micro_batch = 'auto' does not go together with {fixed}")
        if not self.has_blocks and (self.workers.compile == "on" or self.workers.memory_gib is not None):
            name = "compile" if self.workers.compile == "on" else "memory_gib"
            raise ValueError(f"workers.{name} = {getattr(self.workers, name)!r} is for language models: leave it out")
        for workers in (self.workers.min_workers, self.workers.max_workers):
            if size % workers:
                raise ValueError(
                    f"optimizer.batch_size = {size} is not divisible by workers.num_workers = {workers}: "
                    f"choose a multiple of {workers}"
                )
            if micro and size // workers % micro:
                raise ValueError(
                    f"a worker's share of the batch, {size // workers}, is not divisible by "
                    f"optimizer.micro_batch_size = {micro}"
                )

    @property
    def possible_num_workers(self) -> list[int]:
        """Numbers of workers that the run may have, in ascending order: those that divide the batch."""
        size, micro = self.optimizer.batch_size, self.optimizer.micro_batch_size or 1
        numbers = range(self.workers.min_workers, self.workers.max_workers + 1)
        return [number for number in numbers if size % number == 0 and size // number % micro == 0]

    def with_num_workers(self, number: int) -> Self:
        """Return the configuration of the run while it has this number of workers."""
        return replace(self, workers=replace(self.workers, num_workers=number))

    def with_micro_batch_size(self, size: int) -> Self:
        """Return the configuration with this number of samples at a time."""
        optimizer, workers = replace(self.optimizer, micro_batch_size=size), replace(self.workers, micro_batch="given")
        return replace(self, optimizer=optimizer, workers=workers)

    @property
    def trains_networks_alone(self) -> bool:
        """Whether only networks on a frozen base are trained, so that runs can train theirs side by side on the same base."""
        return False

    @property
    def micro_batch_size(self) -> int:
        """Number of samples that a worker processes at a time."""
        return self.optimizer.micro_batch_size or max(1, self.optimizer.batch_size // self.workers.max_workers)

    @property
    def num_accumulation_steps(self) -> int:
        """Number of micro-batches that a worker processes for one optimizer step."""
        return self.optimizer.batch_size // self.workers.max_workers // self.micro_batch_size
