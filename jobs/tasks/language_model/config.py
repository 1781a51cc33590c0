"""The configuration of a language-model training run: its own sections beside those of every run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.config import (
    SteeredTempNetSection,
    TrainingConfig,
    ValidationSection,
    check_not_negative,
    check_positive,
    check_share,
    with_absolute_fields,
)
from tempnet.network import TempNetConfig
from tempnet.softmax.reference import LOSS_KINDS


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
    """Whether packed documents see the documents before them in their block. Models that cannot keep them apart need it."""
    text_field: str = "text"
    """The field that holds the text."""
    max_bad_share: float = 0.01
    """Share of records that may be unreadable before the run fails."""
    shuffle_window: int = 32_768
    """Blocks among which the order is fully random; shards are permuted beyond it."""

    def __post_init__(self) -> None:
        check_positive("data", self, "context_length", "shuffle_window")
        if self.context_length < 2:
            raise ValueError("data.context_length = 1 must be at least 2: a token, and one that follows it")
        check_share("data", self, "max_bad_share")


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
        check_positive("model", self, "hidden_size", "num_layers", "num_heads")
        check_share("model", self, "dropout")
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
class TemperatureSection(SteeredTempNetSection):
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

    def __post_init__(self) -> None:
        if self.loss not in LOSS_KINDS:
            raise ValueError(f"temperature.loss = {self.loss!r} is unknown: choose one of {', '.join(LOSS_KINDS)}")
        if self.rho is not None and self.target_entropy is not None:
            raise ValueError(
                f"temperature.rho = {self.rho} and temperature.target_entropy = {self.target_entropy}: give one of them, "
                "or none to have ρ calibrated"
            )
        check_positive("temperature", self, "tau", "num_calibration_tokens")
        kind = LOSS_KINDS[self.loss]
        self.check_steering(
            has_learned_rho=kind.temperature == "tempnet" and kind.objective == "robust",
            tau_min=self.tau_min,
            tau_max=self.tau_max,
        )
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

    @property
    def has_free_tau(self) -> bool:
        """Whether temperatures follow from the data, rather than being given."""
        return LOSS_KINDS[self.loss].temperature in ("oracle", "tempnet")

    @property
    def tau_range(self) -> tuple[float, float]:
        """τ₀ and τ_max."""
        return self.tau_min, self.tau_max

    def network_config(self, vocab_size: int, rho: float) -> TempNetConfig:
        """The network of this section on an effective vocabulary."""
        return TempNetConfig.for_logits(
            vocab_size, rho=rho, tau_min=self.tau_min, tau_max=self.tau_max, **self.network_options
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockValidationSection(ValidationSection):
    """Loss at τ = 1 and at τ on held-out blocks."""

    num_blocks: int = 64
    """Blocks (from the first) that are scored. 0: all of them."""
    num_oracle_tokens: int = 4096
    """Tokens on which the regret and the best constant temperature are computed at the end."""

    def __post_init__(self) -> None:
        ValidationSection.__post_init__(self)
        check_positive("validation", self, "num_oracle_tokens")
        check_not_negative("validation", self, "num_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelConfig(TrainingConfig):
    """Everything about one training run of a language model and its TempNet."""

    data: DataSection
    model: ModelSection = field(default_factory=ModelSection)
    temperature: TemperatureSection = field(default_factory=TemperatureSection)
    validation: BlockValidationSection = field(default_factory=BlockValidationSection)

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        if not self.tokenizer:
            raise ValueError("data.tokenizer is empty, and there is no model.path to take a tokenizer from")
        if self.temperature.needs_calibration and not self.model.path:
            raise ValueError(
                "temperature.rho and temperature.target_entropy are both None: ρ can be calibrated only on a model that is "
                "there already (model.path), not on random weights; give one of them"
            )
        if self.model.is_frozen and self.temperature.target_tau is not None:
            raise ValueError(
                f"temperature.target_tau = {self.temperature.target_tau:g} steers the ρ of joint training; on a frozen base "
                "the calibrated ρ is final: set temperature.calibrated_tau, with rho and target_entropy None"
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


def with_absolute_paths(config: LanguageModelConfig) -> LanguageModelConfig:
    """The configuration for the workers, whose working directory is another: local paths made absolute."""
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, storage=config.run.resolved_storage),
        data=with_absolute_fields(
            dataclasses.replace(config.data, tokenizer=config.tokenizer), "train", "validation", "tokenizer"
        ),
        model=with_absolute_fields(config.model, "path"),
        temperature=with_absolute_fields(config.temperature, "path"),
    )


def with_rho(config: LanguageModelConfig, rho: float) -> LanguageModelConfig:
    """The configuration with ρ as a number, however it was given."""
    return dataclasses.replace(
        config, temperature=dataclasses.replace(config.temperature, rho=rho, target_entropy=None)
    )
