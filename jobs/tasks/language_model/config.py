"""The configuration of the training of a language model: its own sections, in addition to those of every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs.engine.config import TrainingConfig, ValidationSection
from jobs.engine.fields import (
    FREE_TO_CHANGE,
    PATH,
    added_later,
    alternative,
    check_not_negative,
    check_positive,
    check_share,
    none_was_recorded_as,
    recorded_as,
    stands_for,
    values_of,
)
from jobs.tasks.config import TempNetSection, TextSection
from tempnet.network_config import TempNetConfig, TempNetOptions
from tempnet.rho import rho_from_target_entropy
from tempnet.softmax.config import LOSS_KINDS, LossKind, TemperatureLossConfig

DEFAULT_TAU_MAX = 2.0
LEAST_END_PROBABILITY = 0.01
DISTIL = "distil"
"""Name of the loss with which a model learns from another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfDocument:
    """What a frozen base says at the ends of documents, which are a target only if it gives them 1 % or more.

    A model that was trained to end documents otherwise gives the end-of-text token next to no probability, and one token with
    a cross-entropy of 26 nats outweighs what temperatures do for all others of a document.
    """

    probability: float
    """Geometric mean of the probabilities of the end-of-text token at the ends of documents."""
    num_documents: int
    """Number of these documents."""

    @property
    def is_target(self) -> bool:
        """Whether the end is a target."""
        return self.probability >= LEAST_END_PROBABILITY

    def describe(self) -> str:
        """Return one line of text that says what was measured and what follows."""
        return (
            f"{'a target' if self.is_target else 'no target'}: over the ends of {self.num_documents} documents the model "
            f"gives the end-of-text token a probability of {self.probability:.2g} (geometric mean; "
            f"{LEAST_END_PROBABILITY:g} or more make it one)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection(TextSection):
    """The text, and how its documents are tokenised and packed into blocks."""

    validation: str = field(default="", metadata=PATH)
    """Validation text, in the same formats as `train`. If empty: a fifth of the documents of `train`, which training leaves
    out."""
    tokenizer: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of a Transformers fast tokenizer, or a tokenizer.json file. If empty: that of
    model.path, or else that of distillation.teacher."""
    context_length: int = 1024
    """Number of tokens per block, at least 2."""
    attend_across_documents: bool = False
    """Whether a document attends to the documents before it in the same block. Required for models that cannot separate
    packed documents, such as those with recurrent layers."""
    end_of_document: Literal["measured", "target", "ignored"] = field(
        default="measured", metadata=added_later("measured")
    )
    """Whether the model is to predict the end-of-text token after every document. measured: if it is trained, or if a frozen
    base knows the end: if it gives it a probability of 1 % or more, measured on the text (`EndOfDocument`)."""

    @property
    def predicts_end(self) -> bool:
        """Whether the end of a document is a target, once it was measured where that is needed."""
        return self.end_of_document != "ignored"

    def __post_init__(self) -> None:
        TextSection.__post_init__(self)
        check_positive("data", self, "context_length")
        if self.context_length < 2:
            raise ValueError("data.context_length = 1 must be at least 2: a token, and one that follows it")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureSection(TempNetSection):
    """The loss, its temperature and the TempNet."""

    loss: str = "dro"
    """Name of the loss: ce, fixed, fixed_robust, dro_newton, ts_ce, dro or proper (see `tempnet.softmax.reference`), or
    distil, with which the model learns from `distillation.teacher`."""
    rho: float | None = field(default=10.0, metadata=alternative("target_entropy"))
    """ρ of the robust loss in nats, below log V, where V is the size of the vocabulary. None: computed from
    target_entropy, or calibrated if that is None too."""
    target_entropy: float | None = field(default=None, metadata=alternative("rho"))
    """Entropy log V − ρ, in nats, that the optimal temperature gives every softmax; give either this or rho. If both
    are None, ρ is calibrated on the base model (model.path) so that the mean optimal temperature is calibrated_tau."""
    calibrated_tau: float = 0.85
    """Mean optimal temperature for which ρ is calibrated. The default is the centre of the papers' band [0.7, 1.0]."""
    num_calibration_tokens: int = 4096
    """Number of tokens of the training data on which ρ is calibrated."""
    tau: float = 1.0
    """The fixed temperature of the losses fixed and fixed_robust."""
    tau_min: float = 0.001
    """τ₀, the lower bound of the temperature."""
    tau_max: float | None = field(
        default=None, metadata=stands_for("known_upper_bound") | none_was_recorded_as(DEFAULT_TAU_MAX)
    )
    """τ_max, the upper bound of the temperature. None: 2, or, for the loss proper on a frozen base, what the headroom test
    on a sample of the text asks for (`tempnet.headroom.run`)."""
    input: Literal["logits", "hidden", "both"] = field(default="logits", metadata=added_later("logits"))
    """What the TempNet reads: the logits, as in the papers, the hidden state that they are computed from, or both."""
    path: str = field(default="", metadata=PATH)
    """Directory of a saved TempNet to start from, whose configuration must match this section. If empty: a new TempNet."""

    def __post_init__(self) -> None:
        if self.loss == "reward":
            raise ValueError(
                "temperature.loss = 'reward' learns from prompts and a verifier, not from text: python -m jobs.train_reward"
            )
        if self.loss not in (*LOSS_KINDS, DISTIL):
            raise ValueError(
                f"temperature.loss = {self.loss!r} is unknown: choose one of {', '.join((*LOSS_KINDS, DISTIL))}"
            )
        if self.rho is not None and self.target_entropy is not None:
            raise ValueError(
                f"temperature.rho = {self.rho} and temperature.target_entropy = {self.target_entropy}: give one of them, "
                "or none to have ρ calibrated"
            )
        check_positive("temperature", self, "tau", "num_calibration_tokens")
        if self.input != "logits" and not (self.transform and self.stop_gradient):
            raise ValueError(
                f"temperature.input = {self.input} needs temperature.transform and temperature.stop_gradient: hidden states "
                "are read by the first layer, without a gradient"
            )
        low, high = self.tau_range
        has_learned_rho = self.needs_tempnet and self.kind.objective == "robust"
        self.check_steering(has_learned_rho=has_learned_rho, tau_min=low, tau_max=high)
        if self.needs_calibration and not low < self.calibrated_tau < high:
            raise ValueError(
                f"temperature.calibrated_tau = {self.calibrated_tau:g} must lie between tau_min = {low:g} and "
                f"tau_max = {high:g}"
            )

    @property
    def needs_calibration(self) -> bool:
        """Whether ρ must be calibrated on the base model before training; two losses need none."""
        return self.rho is None and self.target_entropy is None and self.loss not in ("proper", DISTIL)

    @property
    def token_loss(self) -> str:
        """Name of the loss of a token that has no teacher: a student is validated by its cross-entropy."""
        return "ce" if self.loss == DISTIL else self.loss

    @property
    def kind(self) -> LossKind:
        return LOSS_KINDS[self.token_loss]

    @property
    def needs_tempnet(self) -> bool:
        """Whether the loss takes its temperatures from a TempNet."""
        return self.kind.temperature == "tempnet"

    @property
    def fits_likelihood(self) -> bool:
        """Whether a TempNet learns from the likelihood of the text, rather than for a wanted entropy."""
        return self.needs_tempnet and self.kind.objective != "robust"

    @property
    def has_free_tau(self) -> bool:
        """Whether temperatures depend on the data (predicted or optimal) rather than being given."""
        return self.kind.temperature in ("oracle", "tempnet")

    @property
    def tau_range(self) -> tuple[float, float]:
        """The bounds τ₀ and τ_max of the temperature; τ_max is 2 where none is given or measured."""
        return self.tau_min, DEFAULT_TAU_MAX if self.tau_max is None else self.tau_max

    @property
    def known_upper_bound(self) -> float | None:
        """τ_max as far as it is known before anything is measured; None with the loss proper, unless it is given."""
        return self.tau_max if self.loss == "proper" else self.tau_range[1]

    def resolve_rho(self, vocab_size: int) -> float | None:
        """Return ρ, as given or computed from the target entropy; 0 for a loss without; None: it must be calibrated first."""
        if self.target_entropy is not None:
            return rho_from_target_entropy(self.target_entropy, vocab_size)
        return 0.0 if self.rho is None and not self.needs_calibration else self.rho

    def loss_config(self, vocab_size: int) -> TemperatureLossConfig:
        """Return the configuration of the loss that this section describes, once ρ is calibrated."""
        rho, (low, high) = self.resolve_rho(vocab_size), self.tau_range
        assert rho is not None, "ρ is calibrated before a model is built"
        return TemperatureLossConfig(name=self.token_loss, rho=rho, tau=self.tau, tau_min=low, tau_max=high)

    def network_config(self, vocab_size: int, rho: float, state_size: int) -> TempNetConfig:
        """Return the configuration of a TempNet for a vocabulary (the tokenizer's) and hidden states of a given size."""
        low, high = self.tau_range
        fields = {"tau_min": low, "tau_max": high, **values_of(self, TempNetOptions)}
        if self.input == "logits":
            return TempNetConfig.for_logits(vocab_size, rho=rho, **fields)
        if self.input == "hidden":
            fields["input_shift"] = "none"  # It is a shift of logits, which this network does not read.
        return TempNetConfig.for_hidden(vocab_size, state_size, with_logits=self.input == "both", rho=rho, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockValidationSection(ValidationSection):
    """Validation on held-out blocks: the loss at τ = 1 and at the model's temperatures."""

    num_blocks: int = 64
    """Number of validation blocks that are scored, counted from the first. 0: all blocks."""
    num_oracle_tokens: int = 4096
    """Number of tokens, spread evenly over the blocks, on which the final validation of a robust loss computes the regret."""

    def __post_init__(self) -> None:
        ValidationSection.__post_init__(self)
        check_positive("validation", self, "num_oracle_tokens")
        check_not_negative("validation", self, "num_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The base model: pretrained weights to start from, or the architecture of a randomly initialised one."""

    path: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of a Transformers causal LM to start from. If empty: a randomly initialised model of the
    architecture and sizes below."""
    freeze: bool | None = None
    """Train only the TempNet and keep the base model fixed, in eval mode and without gradients. Needs `path`. None:
    frozen if `path` is given."""
    architecture: str = "gpt2"
    """Transformers model type of a random base model. Ignored if path is given."""
    hidden_size: int = 768
    """Hidden size of a random base model; must be a multiple of num_heads. Ignored if path is given."""
    num_layers: int = 12
    """Number of layers of a random base model. Ignored if path is given."""
    num_heads: int = 12
    """Number of attention heads of a random base model. Ignored if path is given."""
    dropout: float = 0.0
    """Dropout probability of a random base model; only for the architecture gpt2. Ignored if path is given."""
    attention: Literal["auto", "sdpa", "flex", "flash", "eager"] = field(
        default="auto", metadata=recorded_as(auto="sdpa")
    )
    """Attention implementation of Transformers. flex: FlexAttention, which keeps packed documents apart without a mask of
    context_length² numbers; a base that is trained needs a GPU for it. flash: FlashAttention 2 or 3, which is given where
    documents begin; it needs a GPU and its package. sdpa takes that mask, and `eager` is faster for short contexts on CPUs.
    auto: sdpa, until flex has been measured on a GPU (`make gpu-check`)."""
    trust_remote_code: bool = False
    """Allow Transformers to run code that comes with the model."""
    precision: Literal["int8", "fp8"] | None = field(default=None, metadata=added_later(None))
    """Weights of a frozen base. None: in the precision of the workers. int8, fp8: those of its linear layers in eight bits,
    products in bfloat16, by torchao; then `workers.zero_stage` is at most 2."""
    features: bool = field(default=False, metadata=added_later(False))
    """Read the last hidden states of a frozen base that `jobs.prepare_features` has stored, instead of running the base."""
    device_map: Literal["auto"] | None = field(default=None, metadata=FREE_TO_CHANGE)
    """auto: `jobs.prepare_features` spreads the base over the GPUs of a model's process, layer by layer, and over the CPU's
    memory and the disk if they are too small. Training spreads no base. None: the base is on one device."""
    num_gpus: int = field(default=1, metadata=FREE_TO_CHANGE)
    """Number of GPUs for each model of `jobs.prepare_features`, with `workers.use_gpu`; more than one need
    `device_map = auto`."""
    whole_export: bool = field(default=False, metadata=FREE_TO_CHANGE)
    """Write a frozen base model into the export too, so that the export needs nothing else. False: the export of a frozen
    base holds the TempNet, the tokenizer, and path and digest of the base. The export of a trained base is always whole."""

    def __post_init__(self) -> None:
        check_positive("model", self, "hidden_size", "num_layers", "num_heads", "num_gpus")
        check_share("model", self, "dropout")
        if not self.path and self.hidden_size % self.num_heads:
            raise ValueError(f"model.hidden_size = {self.hidden_size} is not divisible by num_heads = {self.num_heads}")
        if self.freeze and not self.path:
            raise ValueError(
                "model.freeze = True needs model.path: a random base has nothing to learn temperatures from"
            )

    @property
    def is_frozen(self) -> bool:
        """Whether the base model is frozen, so that only the TempNet is trained."""
        return bool(self.path) if self.freeze is None else self.freeze


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationSection:
    """The teacher of the loss distil (`tempnet.distillation`)."""

    teacher: str = field(default="", metadata=PATH | added_later(""))
    """Directory, URI or hub name of the Transformers causal LM to learn from. It has the tokenizer of the run."""
    keep: Literal["entropy", "temperature"] = field(default="entropy", metadata=added_later("entropy"))
    """What is the same for all predictions of the teacher. entropy: that of temperature.target_entropy, or log V − ρ of
    temperature.rho. temperature: temperature.tau; at 1 the teacher's predictions are used as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelConfig(TrainingConfig):
    """Configuration of a training run of a language model and its TempNet."""

    accumulates_gradients = has_blocks = True

    data: DataSection
    model: ModelSection = field(default_factory=ModelSection)
    temperature: TemperatureSection = field(default_factory=TemperatureSection)
    distillation: DistillationSection = field(default_factory=DistillationSection)
    validation: BlockValidationSection = field(default_factory=BlockValidationSection)

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        self._check_distillation()
        if not self.tokenizer:
            raise ValueError(
                "data.tokenizer is empty, and there is no model.path or distillation.teacher to take a tokenizer from"
            )
        if self.temperature.needs_calibration and not self.model.path:
            raise ValueError(
                "temperature.rho and temperature.target_entropy are both None: ρ can be calibrated only on a model that is "
                "there already (model.path), not on random weights; give one of them"
            )
        if self.temperature.needs_calibration and self.data.is_streaming:
            raise ValueError(
                "data.prepare = 'streaming' prepares the text while training runs, but ρ is calibrated on a sample of all of "
                "it first: set temperature.rho or temperature.target_entropy, or data.prepare ahead"
            )
        if self.model.num_gpus > 1 and not (self.workers.use_gpu and self.model.device_map):
            raise ValueError(
                f"model.num_gpus = {self.model.num_gpus} must be 1, or more with workers.use_gpu and model.device_map = "
                "auto: a base that is not spread uses one GPU"
            )
        if self.model.attention in ("flex", "flash"):
            self._check_packed_attention()
        if self.model.features:
            self._check_features()
        if self.model.precision:
            self._check_eight_bits()
        if self.model.is_frozen:
            self._check_frozen()

    def _check_distillation(self) -> None:
        loss, teacher = self.temperature.loss, self.distillation.teacher
        if self.is_distilled != bool(teacher):
            raise ValueError(
                f"temperature.loss = {loss!r} and distillation.teacher = {teacher!r}: the loss {DISTIL} needs a teacher to "
                "learn from, and no other loss has one"
            )
        if not self.is_distilled:
            return
        if self.workers.zero_stage == 3:
            raise ValueError(
                f"workers.zero_stage = 3 divides the model's weights, which the loss {DISTIL} reads in parts: choose 0, 1 or "
                "2"
            )
        if self.distillation.keep == "entropy" and self.temperature.rho is self.temperature.target_entropy is None:
            raise ValueError(
                "distillation.keep = 'entropy' needs temperature.target_entropy or temperature.rho: the entropy of the "
                "teacher's predictions"
            )

    def _check_packed_attention(self) -> None:
        held = f"model.attention = {self.model.attention!r}"
        if not (self.workers.use_gpu or (self.model.is_frozen and self.model.attention == "flex")):
            lacks = "has no backward pass on CPUs" if self.model.attention == "flex" else "does not run on CPUs"
            raise ValueError(f"{held} {lacks}: choose auto, sdpa or eager, or workers.use_gpu")
        if self.model.attention == "flash" and self.workers.resolved_precision == "fp32":
            raise ValueError(
                f"{held} computes in half precision: choose workers.precision bf16, or auto, sdpa or eager"
            )
        if self.data.attend_across_documents:
            raise ValueError(
                f"{held} keeps packed documents apart, which data.attend_across_documents = True does not want: choose sdpa"
            )
        if self.is_distilled or self.model.device_map:
            raise ValueError(
                f"{held} is for one base on one device, without a teacher (distillation.teacher) and model.device_map: "
                "choose auto or sdpa"
            )

    def _check_features(self) -> None:
        if not self.model.is_frozen:
            raise ValueError("model.features = True needs a frozen base: the hidden states of a trained one change")
        if self.data.is_streaming:
            raise ValueError(
                "model.features = True: data.prepare must be ahead, as the features are those of whole text"
            )
        if self.model.whole_export:
            raise ValueError("model.features = True does not load the base, so model.whole_export must be False")
        if not self.trains_networks_alone:
            raise ValueError(
                "model.features = True needs a TempNet with temperature.transform and temperature.stop_gradient True"
            )

    def _check_eight_bits(self) -> None:
        held = f"model.precision = {self.model.precision}"
        if not self.model.is_frozen:
            raise ValueError(f"{held} is for a frozen base (model.freeze): weights in eight bits cannot be trained")
        if self.workers.resolved_precision != "bf16":
            raise ValueError(f"{held} computes products in bfloat16: workers.precision must be bf16, not fp32")
        if self.workers.zero_stage == 3 and not self.model.features:
            raise ValueError(
                f"{held}: weights in eight bits cannot be divided among workers by workers.zero_stage = 3: choose 0, 1 or 2, "
                "or store the hidden states once (jobs.prepare_features) and train with model.features"
            )
        if self.model.whole_export:
            raise ValueError(
                f"{held}: model.whole_export must be False, because an export has no weights in eight bits; it names the "
                "base, and --dtype or --precision of the other jobs holds it in eight bits again"
            )

    def _check_frozen(self) -> None:
        if self.temperature.target_tau is not None:
            raise ValueError(
                f"temperature.target_tau = {self.temperature.target_tau:g} steers the ρ of joint training; on a frozen base "
                "the calibrated ρ is final: set temperature.calibrated_tau, with rho and target_entropy None"
            )
        if self.workers.activation_checkpointing:
            raise ValueError(
                "workers.activation_checkpointing = True saves the memory of a base model's backward pass, which a frozen "
                "base does not have (model.freeze, the default with a model.path): choose False"
            )
        if not self.temperature.needs_tempnet:
            raise ValueError(
                "model.freeze = True (the default with a model.path) leaves nothing to train with "
                f"temperature.loss = {self.temperature.loss!r}: choose dro, proper or ts_ce, or model.freeze False"
            )

    @property
    def base_precision(self) -> str:
        """Precision of the base's weights: fp32, bf16, int8 or fp8."""
        if not self.model.is_frozen:
            return "fp32"
        return self.model.precision or self.workers.resolved_precision

    @property
    def has_measured_range(self) -> bool:
        """Whether the range of τ is measured before training."""
        return self.model.is_frozen and self.temperature.loss == "proper" and self.temperature.tau_max is None

    @property
    def is_distilled(self) -> bool:
        """Whether the model learns from a teacher."""
        return self.temperature.loss == DISTIL

    @property
    def trains_networks_alone(self) -> bool:
        """Whether the base is frozen, and the TempNet is one that can be trained beside others on it."""
        return self.model.is_frozen and self.temperature.transform and self.temperature.stop_gradient

    @property
    def tokenizer(self) -> str:
        """Directory, URI or hub name of the tokenizer, or a tokenizer.json file."""
        return self.data.tokenizer or self.model.path or self.distillation.teacher


def with_rho(config: LanguageModelConfig, rho: float) -> LanguageModelConfig:
    """Return the configuration with the given ρ instead of a target entropy or a calibration."""
    return dataclasses.replace(
        config, temperature=dataclasses.replace(config.temperature, rho=rho, target_entropy=None)
    )


def with_measured(config: LanguageModelConfig, record: Mapping[str, Any]) -> LanguageModelConfig:
    """Return the configuration with what was measured on its base (`calibration.json`) in the place of defaults."""
    if "rho" in record and config.temperature.needs_calibration:
        config = with_rho(config, float(record["rho"]))
    data, temperature = config.data, config.temperature
    if "end_of_document" in record and data.end_of_document == "measured":
        is_target = EndOfDocument(**record["end_of_document"]).is_target
        data = dataclasses.replace(data, end_of_document="target" if is_target else "ignored")
    if "tau_range" in record:
        temperature = dataclasses.replace(temperature, tau_max=float(record["tau_range"]["tau_max"]))
    return dataclasses.replace(config, data=data, temperature=temperature)
