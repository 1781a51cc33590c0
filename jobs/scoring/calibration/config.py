"""The configurations of the subcommands of `jobs.calibrate`, that is, its command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jobs.scoring.config import check_least


@dataclass(frozen=True, slots=True, kw_only=True)
class Rho:
    """Compute the mean optimal temperature τ* of a base model over a range of ρ, and find the ρ for a wanted mean."""

    model: str
    """Directory, URI or hub name of a Transformers causal LM."""
    text: str
    """Path or URI of the text: a file or a directory of files, in the formats that `train_lm` reads."""
    tokenizer: str = ""
    """Directory, URI or hub name of the tokenizer, or a tokenizer.json file. If empty: the model's own tokenizer."""
    tau: float = 0.85
    """The wanted mean temperature. The default is the centre of the papers' band [0.7, 1.0]."""
    tau_min: float = 0.001
    """τ₀, the lower bound of the temperature."""
    tau_max: float = 2.0
    """τ_max, the upper bound of the temperature."""
    num_tokens: int = 4096
    """Number of tokens in the sample of text."""
    context_length: int = 0
    """Number of tokens per block. 0: 256, or the number of the model's positions if that is smaller."""
    attend_across_documents: bool = False
    """Whether a document attends to the documents before it in the same block."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the model is run."""
    use_gpu: bool = False
    """Run the model on a GPU of the cluster."""
    device_map: Literal["auto"] | None = None
    """auto: spread the layers over `num_gpus` GPUs of a node and the CPU's memory. None: the model is on one device."""
    num_gpus: int = 1
    """Number of GPUs that are reserved with `use_gpu`; more than one need `device_map = auto`."""
    storage: str = ""
    """Directory or URI for the prepared text. If empty: $TEMPNET_HOME, else ./runs."""
    output: str = "calibration"
    """Directory or URI for calibration.json and curve.png."""
    trust_remote_code: bool = False
    """Allow Transformers to run code that comes with the model."""

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or (self.num_gpus > 1 and not (self.use_gpu and self.device_map)):
            raise ValueError(
                f"num_gpus = {self.num_gpus} must be 1, or more with use_gpu and device_map = auto: a model that is not "
                "spread uses one GPU"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TauMax:
    """Find the τ_max with which a trained TempNet has a wanted mean τ over generated text, and save it with the TempNet."""

    model: str
    """Directory, URI or hub name of an export, or of any Transformers causal LM together with --tempnet."""
    prompts: str
    """Text file (path or URI) with one prompt per line."""
    tempnet: str = ""
    """Directory, URI or hub name of the TempNet. If empty: the TempNet in the model's directory."""
    mean_tau: float = 0.7
    """The wanted mean temperature (TempNet §6.4 uses 0.7 for chat)."""
    num_prompts: int = 32
    """Number of prompts to use, counted from the first."""
    num_new_tokens: int = 32
    """Number of tokens to generate for each prompt; the mean is taken over these tokens."""
    tolerance: float = 0.01
    """Standard error of the mean at which the search stops."""
    max_rounds: int = 20
    """Maximum number of rounds, at least 2, each of which generates a text for every prompt."""
    batch_size: int = 8
    """Number of prompts to generate from at the same time."""
    seed: int = 0
    """Random seed of the sampling of tokens."""
    device_map: Literal["auto"] | None = None
    """auto: spread the layers over all GPUs of this machine and the CPU's memory. None: the model is on the CPU."""
    dry_run: bool = False
    """Print the result without saving it with the TempNet."""

    def __post_init__(self) -> None:
        # What the first round finds is not pooled, so it ends no search.
        check_least(self, num_prompts=1, num_new_tokens=1, max_rounds=2, batch_size=1)
        for name in ("tolerance", "mean_tau"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be positive")
