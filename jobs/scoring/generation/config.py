"""What a person may set for `jobs.generate`, and what of it decides the texts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

CHOICES = ("auto", "tempnet", "greedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """A model, prompts, a temperature, and where the texts go."""

    model: str
    """A Transformers causal LM: a directory (as training exports it, with `tempnet/` beside it) or a hub name."""
    prompts: str
    """The file of prompts, in the format that `--format` names."""
    output: str
    """The file to write. One of the same settings is continued: what it holds is not generated again."""
    format: Literal["text", "alpaca-eval", "mt-bench", "gsm8k"] = "text"
    """text: `.txt`, a prompt a line, or JSONL with `prompt` (and `id`). The others: the files of those benchmarks."""
    temperature: str = "auto"
    """tempnet: predicted for every token; a number: the same for all; greedy: the largest logit.
    auto: tempnet where the model has one, else 1."""
    tempnet: str = ""
    """Where the TempNet is. Default: beside the model."""
    tau_max_eval: float | None = None
    """τ_max of the TempNet here; rescales all its temperatures. Default: what is saved with it."""
    top_k: int = 0
    """Draw among the k likeliest tokens only; 0: among all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that hold this share of the probability only."""
    num_samples: int = 1
    """Texts for every prompt."""
    max_new_tokens: int = 256
    """Tokens of a text, at most."""
    seed: int = 0
    """With the prompt's id and the number of the sample it fixes a text, whatever the batch."""
    batch_size: int = 8
    """Texts that are generated side by side."""
    limit: int = 0
    """Only so many prompts, from the first on; 0: all."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Put prompts into the tokenizer's chat template. auto: where it has one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the base model; a TempNet computes in float32 always."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto: a GPU where there is one."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    entropy: bool = True
    """Record the entropy of every prediction at τ = 1."""
    html: str = ""
    """Also write a page here with every token coloured by its τ."""
    generator: str = ""
    """Name of the model in the files of alpaca-eval and mt-bench. Default: `--model`."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("top_k", "limit"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p = {self.top_p:g} must lie in (0, 1]")
        fixed = self.fixed_temperature
        if fixed is not None and not (fixed > 0.0 and math.isfinite(fixed)):
            raise ValueError(f"temperature = {self.temperature} must be positive; for the largest logit, say greedy")
        if (self.tempnet or self.tau_max_eval is not None) and self.temperature not in ("auto", "tempnet"):
            raise ValueError(f"temperature = {self.temperature} uses no TempNet: leave out tempnet and tau_max_eval")
        if self.temperature == "greedy" and (self.num_samples > 1 or self.top_k or self.top_p < 1.0 or self.html):
            raise ValueError(
                "temperature = greedy draws nothing: num_samples, top_k, top_p and html have no meaning with it"
            )
        if self.html and not self.entropy:
            raise ValueError("html shows the entropy beside τ: leave out --no-entropy")
        if self.format == "alpaca-eval" and self.num_samples > 1:
            raise ValueError(f"num_samples = {self.num_samples}: alpaca-eval holds one output for an instruction")

    @property
    def fixed_temperature(self) -> float | None:
        """The number that `temperature` is, or None.

        Raises:
            ValueError: if it is neither a number nor a word that means something.
        """
        if self.temperature in CHOICES:
            return None
        try:
            return float(self.temperature)
        except ValueError:
            raise ValueError(
                f"temperature = {self.temperature!r} is neither a number nor one of {', '.join(CHOICES)}"
            ) from None
