"""The section of a configuration that names the base model, and what a frozen one allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.config import WorkersSection
from jobs.engine.fields import FREE_TO_CHANGE, PATH, added_later, check_positive, check_share


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
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of Transformers. `eager` is the faster one for short contexts on CPUs."""
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

    def check(
        self,
        workers: WorkersSection,
        *,
        loss: str,
        has_tempnet: bool,
        reads_detached_transform: bool,
        is_streaming: bool,
    ) -> None:
        """Check that the section fits to the rest of the configuration.

        Args:
            workers: the workers of the run.
            loss: name of the loss.
            has_tempnet: whether the loss takes its temperatures from a TempNet.
            reads_detached_transform: whether the TempNet begins with a layer that reads its input without a gradient.
            is_streaming: whether the text is prepared while training runs.

        Raises:
            ValueError: if it does not; the message names the fields.
        """
        if self.num_gpus > 1 and not (workers.use_gpu and self.device_map):
            raise ValueError(
                f"model.num_gpus = {self.num_gpus} must be 1, or more with workers.use_gpu and model.device_map = auto: a "
                "base that is not spread uses one GPU"
            )
        if self.features:
            self._check_features(is_streaming=is_streaming, reads_detached_transform=reads_detached_transform)
        if self.precision:
            self._check_eight_bits(workers)
        if self.is_frozen and workers.activation_checkpointing:
            raise ValueError(
                "workers.activation_checkpointing = True saves the memory of a base model's backward pass, which a frozen "
                "base does not have (model.freeze, the default with a model.path): choose False"
            )
        if self.is_frozen and not has_tempnet:
            raise ValueError(
                "model.freeze = True (the default with a model.path) leaves nothing to train with "
                f"temperature.loss = {loss!r}: choose dro, proper or ts_ce, or model.freeze False"
            )

    def _check_features(self, *, is_streaming: bool, reads_detached_transform: bool) -> None:
        if not self.is_frozen:
            raise ValueError("model.features = True needs a frozen base: the hidden states of a trained one change")
        if is_streaming:
            raise ValueError(
                "model.features = True: data.prepare must be ahead, as the features are those of whole text"
            )
        if self.whole_export:
            raise ValueError("model.features = True does not load the base, so model.whole_export must be False")
        if not reads_detached_transform:
            raise ValueError(
                "model.features = True needs a TempNet with temperature.transform and temperature.stop_gradient True"
            )

    def _check_eight_bits(self, workers: WorkersSection) -> None:
        held = f"model.precision = {self.precision}"
        if not self.is_frozen:
            raise ValueError(f"{held} is for a frozen base (model.freeze): weights in eight bits cannot be trained")
        if workers.resolved_precision != "bf16":
            raise ValueError(f"{held} computes products in bfloat16: workers.precision must be bf16, not fp32")
        if workers.zero_stage == 3 and not self.features:
            raise ValueError(
                f"{held}: weights in eight bits cannot be divided among workers by workers.zero_stage = 3: choose 0, 1 or 2, "
                "or store the hidden states once (jobs.prepare_features) and train with model.features"
            )
        if self.whole_export:
            raise ValueError(
                f"{held}: model.whole_export must be False, because an export has no weights in eight bits; it names the "
                "base, and --dtype or --precision of the other jobs holds it in eight bits again"
            )
