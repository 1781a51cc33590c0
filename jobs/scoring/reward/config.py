"""The configuration, that is, the command line, of `jobs.train_reward`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.config import RunSection, TrackingSection
from jobs.engine.fields import FREE_TO_CHANGE, PATH, check_not_negative, check_positive, values_of
from jobs.scoring.config import PoolSection, check_least
from jobs.scoring.verifiers.verifier import VerifierSection
from tempnet.controllers import KLController
from tempnet.network_config import TempNetConfig, TempNetOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTemperatureSection(TempNetOptions):
    """The TempNet. It has no ρ, because no robust loss trains it."""

    input: Literal["logits", "hidden", "both"] = "hidden"
    """What the TempNet reads: the logits, the hidden state that they are computed from, or both."""
    normalize_input: bool = False
    """Whether the TempNet divides its input by the L2 norm. Unlike in the papers it does not: from a hidden state of norm 1
    a new network learns many times more slowly."""
    pooling: Literal["parametric", "linear"] = "linear"
    """Pooling of the TempNet: one linear layer, s = Σ_k w_k·u_k/d2 + b, or parametrised, as in the papers. The linear one
    begins at one temperature for every input, and learns to tell contexts apart sooner."""
    tau_min: float = 0.001
    """τ₀, the lower bound of the temperature."""
    tau_max: float = 2.0
    """τ_max, the upper bound of the temperature."""
    path: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of a TempNet to start from, whose configuration must match this section. If empty: a new
    TempNet, whose temperatures begin near the best constant."""

    def network_config(self, vocab_size: int, state_size: int) -> TempNetConfig:
        """Return the configuration of a TempNet for a vocabulary (the tokenizer's) and hidden states of a given size."""
        fields = {"tau_min": self.tau_min, "tau_max": self.tau_max, **values_of(self, TempNetOptions)}
        if self.input == "logits":
            return TempNetConfig.for_logits(vocab_size, rho=0.0, **fields)
        if self.input == "hidden":
            fields["input_shift"] = "none"  # It is a shift of logits, which this network does not read.
        return TempNetConfig.for_hidden(vocab_size, state_size, with_logits=self.input == "both", rho=0.0, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeashSection:
    """How far the texts may go from those that the model gives at the best constant c: KL(π_τ ‖ π_c), in nats a text.

    The goal of the divergence rises from 0 to the largest that is tried; the weights at 1/8, 1/4, 1/2 and all of it are
    compared on new texts of the training prompts, and the best are kept.
    """

    target_kl: float | None = None
    """The largest divergence that is tried. None: allowance times −log of the mean reward at the best constant."""
    allowance: float = 4.0
    """Largest divergence, in units of −log of the mean reward at the best constant: the divergence of the nearest policy of
    any kind that is always right. A temperature is no policy of any kind, and needs more."""
    weight: float = 1.0
    """λ at the first step: the reward that a nat of divergence costs."""
    gain: float = 1.0
    """κ, the exponent with which λ answers a divergence that is off its goal."""
    reset_steps: float = 30.0
    """Number of steps in which a divergence that is off by a factor of e moves λ by a factor of e. 0: λ stays at
    weight, and there is no goal."""

    def __post_init__(self) -> None:
        if self.target_kl is not None:
            check_positive("leash", self, "target_kl")
        check_not_negative("leash", self, "gain", "reset_steps")
        check_positive("leash", self, "allowance")
        try:
            KLController(self.weight, target=1.0)
        except ValueError as error:
            raise ValueError(f"leash.{error}") from None


@dataclass(frozen=True, kw_only=True)  # without slots, so that a class can inherit from other slotted ones too
class RewardedTexts:
    """Texts that a model writes for prompts, and how a verifier rewards them."""

    model: str = field(metadata=PATH)
    """Directory, URI or hub name of a Transformers causal LM, which stays as it is."""
    prompts: str = field(metadata=PATH)
    """The file of prompts, a path or URI, in the format that `--format` names."""
    verifier: VerifierSection
    format: Literal["text", "gsm8k"] = "text"
    """Format of the prompts. text: `.txt` with one prompt per line, or JSONL with `prompt`, optionally `id`, and what the
    verifier compares with. gsm8k: the file of that benchmark, asked with eight worked examples."""
    reward: Literal["each", "distinct"] = "each"
    """each: every text earns its reward. distinct: of texts that are the same but for white space, the best earns it
    once, so that variety pays."""
    max_new_tokens: int = 256
    """Maximum number of new tokens per text."""
    seed: int = 0
    """Random seed of the texts; in training, of the TempNet's weights and the order of the prompts too."""
    limit: int = 0
    """Use only this many prompts, the first ones of the file; 0: all."""
    prompts_at_a_time: int = field(default=1, metadata=FREE_TO_CHANGE)
    """Number of prompts whose texts a worker generates as one batch."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Whether to put prompts into the tokenizer's chat template. auto: if the tokenizer has one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the base model. A TempNet always computes in float32."""
    trust_remote_code: bool = False
    """Allow Transformers to run code that is shipped with the model."""
    workers: PoolSection = field(default_factory=PoolSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(RewardedTexts):
    """The model, the prompts, the verifier, the leash and the TempNet that learns."""

    held_out_prompts: str = field(default="", metadata=PATH)
    """A file of prompts in the same format that nothing is learned from: the verdict is about them. If empty: a share of
    the prompts."""
    held_out_share: float = 0.2
    """Share of the prompts, in [0, 1), that is held out if there is no file of held-out prompts. Where that is fewer than
    two prompts, the verdict is about new texts of the training prompts."""
    name: str = field(default="reward", metadata=FREE_TO_CHANGE)
    """Name of the run, and of its directory in storage. Starting a run of the same name again continues it."""
    storage: str = field(default="", metadata=FREE_TO_CHANGE)
    """Directory or URI of runs and the MLflow store. Default: $TEMPNET_HOME, else ./runs."""
    num_steps: int = 200
    """Number of optimizer steps; over the last fifth the learning rate falls to 0 linearly."""
    prompts_per_step: int = 8
    """Number of prompts per step, each with a group of texts."""
    group_size: int = 16
    """Number of texts per prompt and step, at least 2: a text is compared with the others of its group."""
    learning_rate: float = 3e-2
    """Learning rate of the TempNet at the first step."""
    max_grad_norm: float = 1.0
    """Maximum L2 norm to which the gradient is clipped."""
    checkpoint_every: int = field(default=10, metadata=FREE_TO_CHANGE)
    """Steps between checkpoints; one more is written after the last step."""
    leash: LeashSection = field(default_factory=LeashSection)
    temperature: RewardTemperatureSection = field(default_factory=RewardTemperatureSection)
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="reward"))

    def __post_init__(self) -> None:
        check_least(
            self,
            num_steps=1,
            prompts_per_step=1,
            group_size=2,
            max_new_tokens=1,
            seed=0,
            limit=0,
            prompts_at_a_time=1,
            checkpoint_every=1,
        )
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} = {getattr(self, name):g} must be positive")
        if self.format == "gsm8k" and self.verifier.name in ("exact", "unit-tests"):
            raise ValueError(
                f"verifier.name = {self.verifier.name} needs other fields than format = gsm8k has: say gsm8k"
            )
        if not 0.0 <= self.held_out_share < 1.0:
            raise ValueError(f"held_out_share = {self.held_out_share:g} must lie in [0, 1)")
        self.temperature.network_config(vocab_size=2, state_size=1)  # raises ValueError if the switches do not fit
        _ = self.run.resolved_storage

    @property
    def run(self) -> RunSection:
        """Name and storage as the section that training runs use, checked by the same rules."""
        return RunSection(name=self.name, storage=self.storage, num_steps=self.num_steps)
