"""The configuration of a language-model training run: one dataclass a section, checked as soon as it is made."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tempnet.network import TempNetConfig
from tempnet.softmax.reference import LOSS_KINDS


def _positive(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ValueError(f"{section}.{name} = {value} must be positive")


def _share(section: str, config: Any, *names: str) -> None:
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

    def __post_init__(self) -> None:
        _positive("run", self, "num_steps", "checkpoint_every", "num_checkpoints_kept", "log_every")
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
    def directory(self) -> str:
        """Where this run's checkpoints, export and report go."""
        return f"{self.resolved_storage}/{self.name}"

    @property
    def export_directory(self) -> str:
        """Where the finished model goes: a Transformers directory with `tempnet/` beside it."""
        return f"{self.directory}/export"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """Text in, blocks of tokens out."""

    train: str
    """Training archives: a .jsonl.zst/.tar/.jsonl/.jsonl.gz/.parquet file or a directory of them, path or URI."""
    validation: str
    """Validation archives, likewise."""
    tokenizer: str = ""
    """A Transformers fast tokenizer: directory, tokenizer.json or hub name. Empty: the one of model.path."""
    context_length: int = 1024
    """Tokens a block."""
    attend_across_documents: bool = False
    """Whether packed documents see the documents before them in their block."""
    text_field: str = "text"
    """The field that holds the text."""
    max_bad_share: float = 0.01
    """Share of records that may be unreadable before the run fails."""
    shuffle_window: int = 32_768
    """Blocks among which the order is fully random; shards are permuted beyond it."""

    def __post_init__(self) -> None:
        _positive("data", self, "context_length", "shuffle_window")
        _share("data", self, "max_bad_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The base model: weights to start from, or an architecture to start at random."""

    path: str = ""
    """A Transformers causal LM (directory or hub name) to start from. Empty: random weights of `architecture`."""
    freeze: bool | None = None
    """Train only the TempNet; the base stays in eval mode, without a graph. None: whenever there is a path."""
    architecture: str = "gpt2"
    """Transformers model type of a random start."""
    hidden_size: int = 768
    """Width of a random start."""
    num_layers: int = 12
    """Layers of a random start."""
    num_heads: int = 12
    """Attention heads of a random start."""
    dropout: float = 0.0
    """Dropout of a random start."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Transformers' attention implementation; eager is the faster one for short contexts on CPUs."""
    trust_remote_code: bool = False
    """Let Transformers run code that comes with the model."""

    def __post_init__(self) -> None:
        _positive("model", self, "hidden_size", "num_layers", "num_heads")
        _share("model", self, "dropout")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"model.hidden_size = {self.hidden_size} is not divisible by num_heads = {self.num_heads}")
        if self.freeze and not self.path:
            raise ValueError(
                "model.freeze = True needs model.path: a random base has nothing to learn temperatures from"
            )

    @property
    def is_frozen(self) -> bool:
        """Whether only the TempNet is trained."""
        return bool(self.path) if self.freeze is None else self.freeze


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureSection:
    """The loss and the temperature network."""

    loss: str = "dro"
    """ce, fixed, fixed_robust, dro_newton, ts_ce or dro (tempnet.softmax.reference)."""
    rho: float | None = 10.0
    """ρ in nats, below log V. None: computed from target_entropy, or calibrated."""
    target_entropy: float | None = None
    """log V − ρ in nats: the entropy that an optimal temperature brings every softmax to. None, and rho None: ρ is calibrated
    on the base model, so that its mean optimal temperature is calibrated_tau."""
    calibrated_tau: float = 0.85
    """The mean temperature that ρ is calibrated for: the centre of the papers' band [0.7, 1.0]."""
    num_calibration_tokens: int = 4096
    """Contexts of the training data on which ρ is calibrated."""
    tau: float = 1.0
    """The temperature of the losses `fixed` and `fixed_robust`."""
    tau_min: float = 0.001
    """τ₀."""
    tau_max: float = 2.0
    """τ_max."""
    path: str = ""
    """A saved TempNet to start from; its sizes and switches must agree with this section."""
    hidden_size: int = 256
    """d1."""
    num_prototypes: int = 256
    """d2."""
    phi_init: float = 1.0
    """Initial φ of the pooling."""
    normalize_input: bool = True
    """Ablation (Table 20)."""
    transform: bool = True
    """Ablation (Table 20)."""
    projection: bool = True
    """Ablation (Table 20)."""
    pooling: Literal["parametric", "linear"] = "parametric"
    """Ablation (Table 20)."""
    depth: Literal[3, 4] = 3
    """Ablation (Table 21)."""
    stop_gradient: bool = True
    """Ablation (Table 18)."""

    def __post_init__(self) -> None:
        if self.loss not in LOSS_KINDS:
            raise ValueError(f"temperature.loss = {self.loss!r} is unknown: choose one of {', '.join(LOSS_KINDS)}")
        if self.rho is not None and self.target_entropy is not None:
            raise ValueError(
                f"temperature.rho = {self.rho} and temperature.target_entropy = {self.target_entropy}: give one of them, "
                "or none to have ρ calibrated"
            )
        _positive("temperature", self, "tau", "num_calibration_tokens")
        if self.needs_calibration and not self.tau_min < self.calibrated_tau < self.tau_max:
            raise ValueError(
                f"temperature.calibrated_tau = {self.calibrated_tau:g} must lie between tau_min = {self.tau_min:g} and "
                f"tau_max = {self.tau_max:g}"
            )

    @property
    def needs_calibration(self) -> bool:
        """Whether ρ has to be read off the base model first."""
        return self.rho is None and self.target_entropy is None

    @property
    def needs_tempnet(self) -> bool:
        """Whether the loss reads a temperature network."""
        return LOSS_KINDS[self.loss].temperature == "tempnet"

    def network_config(self, vocab_size: int, rho: float) -> TempNetConfig:
        """The network of this section on an effective vocabulary."""
        switches = ("normalize_input", "transform", "projection", "pooling", "depth", "stop_gradient")
        sizes = ("hidden_size", "num_prototypes", "phi_init", "tau_min", "tau_max")
        values = {name: getattr(self, name) for name in (*switches, *sizes)}
        return TempNetConfig.for_logits(vocab_size, rho=rho, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """AdamW with a cosine schedule after a linear warm-up, one pace for the base and one for the TempNet."""

    batch_size: int = 32
    """Blocks in the global batch."""
    micro_batch_size: int = 0
    """Blocks a worker holds at a time; the rest is accumulated. 0: all of its share."""
    learning_rate_base: float = 6e-4
    learning_rate_tempnet: float = 1e-4
    weight_decay: float = 0.1
    """Of matrices; biases, norms, φ and b have none."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    warmup_share: float = 0.01
    """Share of the steps in which the rate climbs linearly from 0."""
    final_share: float = 0.0
    """Share of the rate that is left at the end of the cosine."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this L2 norm. 0: never."""

    def __post_init__(self) -> None:
        _positive("optimizer", self, "batch_size", "learning_rate_base", "learning_rate_tempnet", "epsilon")
        _share("optimizer", self, "beta1", "beta2", "warmup_share", "final_share")
        for name in ("micro_batch_size", "weight_decay", "max_grad_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name} = {getattr(self, name)} must not be negative")


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
    """PyTorch threads of a worker. 0: the physical cores of the machine shared among the workers."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO stage."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """bf16: matrix products of the base in bfloat16 by autocast, a frozen base held in bfloat16; all else float32."""
    activation_checkpointing: bool = False
    """Recompute the base's activations in the backward pass."""
    offload_optimizer: bool = False
    """Keep optimizer state in CPU memory (ZeRO 1-3)."""

    def __post_init__(self) -> None:
        _positive("workers", self, "num_workers", "cpus_per_worker")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("workers.offload_optimizer = True needs workers.zero_stage 1, 2 or 3, not 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSection:
    """Loss at τ = 1 and at τ on held-out blocks."""

    every: int = 500
    """Steps between validations; one more at the end."""
    num_blocks: int = 64
    """Blocks (from the first) that are scored. 0: all of them."""
    num_oracle_tokens: int = 4096
    """Tokens on which the regret and the best constant temperature are computed at the end."""

    def __post_init__(self) -> None:
        _positive("validation", self, "every", "num_oracle_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSection:
    """MLflow."""

    uri: str = ""
    """Tracking URI. Default: $MLFLOW_TRACKING_URI, else sqlite in run.storage."""
    experiment: str = "language-models"
    """Experiment name."""
    enabled: bool = True
    """Whether anything is logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelConfig:
    """Everything about one training run of a language model and its TempNet."""

    run: RunSection
    data: DataSection
    model: ModelSection = field(default_factory=ModelSection)
    temperature: TemperatureSection = field(default_factory=TemperatureSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    workers: WorkersSection = field(default_factory=WorkersSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    tracking: TrackingSection = field(default_factory=TrackingSection)

    def __post_init__(self) -> None:
        workers, micro = self.workers.num_workers, self.micro_batch_size
        if self.optimizer.batch_size % workers:
            raise ValueError(
                f"optimizer.batch_size = {self.optimizer.batch_size} is not divisible by "
                f"workers.num_workers = {workers}: choose a multiple of {workers}"
            )
        if self.optimizer.batch_size // workers % micro:
            raise ValueError(
                f"a worker's share of the batch, {self.optimizer.batch_size // workers} blocks, is not divisible by "
                f"optimizer.micro_batch_size = {micro}"
            )
        if not self.tokenizer:
            raise ValueError("data.tokenizer is empty, and there is no model.path to take a tokenizer from")
        if self.temperature.needs_calibration and not self.model.path:
            raise ValueError(
                "temperature.rho and temperature.target_entropy are both None: ρ can be calibrated only on a model that is "
                "there already (model.path), not on random weights; give one of them"
            )
        if self.model.is_frozen and not self.temperature.needs_tempnet:
            raise ValueError(
                "model.freeze = True (the default with a model.path) leaves nothing to train with "
                f"temperature.loss = {self.temperature.loss!r}: choose dro or ts_ce, or model.freeze False"
            )

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer comes from."""
        return self.data.tokenizer or self.model.path

    @property
    def micro_batch_size(self) -> int:
        """Blocks a worker holds at a time."""
        return self.optimizer.micro_batch_size or max(1, self.optimizer.batch_size // self.workers.num_workers)

    @property
    def num_accumulation_steps(self) -> int:
        """Micro-batches a worker runs for one optimizer step."""
        return self.optimizer.batch_size // self.workers.num_workers // self.micro_batch_size


def with_absolute_paths(config: LanguageModelConfig) -> LanguageModelConfig:
    """The configuration for the workers, whose working directory is another: local paths made absolute."""

    def absolute(value: str) -> str:
        return str(Path(value).resolve()) if value and "://" not in value and Path(value).exists() else value

    data, model, temperature = config.data, config.model, config.temperature
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, storage=config.run.resolved_storage),
        data=dataclasses.replace(
            data,
            train=absolute(data.train),
            validation=absolute(data.validation),
            tokenizer=absolute(config.tokenizer),
        ),
        model=dataclasses.replace(model, path=absolute(model.path)),
        temperature=dataclasses.replace(temperature, path=absolute(temperature.path)),
    )


def with_rho(config: LanguageModelConfig, rho: float) -> LanguageModelConfig:
    """The configuration with ρ as a number, however it was given."""
    return dataclasses.replace(
        config, temperature=dataclasses.replace(config.temperature, rho=rho, target_entropy=None)
    )
