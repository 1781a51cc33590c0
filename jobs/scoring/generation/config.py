"""The configurations, that is, the command lines, of `jobs.generate` and `jobs.playground`."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.fields import FREE_TO_CHANGE
from jobs.scoring.config import check_least, check_precision

CHOICES = ("auto", "tempnet", "greedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model and its TempNet in this process."""

    model: str
    """Directory, URI or hub name of a Transformers causal LM, such as an export of training (with `tempnet/` in it)."""
    tempnet: str = ""
    """Directory, URI or hub name of the TempNet. Default: the one beside the model."""
    dtype: Literal["float32", "bfloat16", "float16", "int8", "fp8"] = "float32"
    """Data type of the base model; int8, fp8: weights in eight bits, products in bfloat16, by torchao.
    A TempNet always computes in float32."""
    device: str = field(default="auto", metadata=FREE_TO_CHANGE)
    """PyTorch device: cpu, cuda, cuda:1, …; auto: a GPU if there is one, else the CPU."""
    device_map: Literal["auto"] | None = field(default=None, metadata=FREE_TO_CHANGE)
    """auto: spread the model over all GPUs of this machine, layer by layer, and over the CPU's memory if they are too
    small. None: the model is on `device`."""
    trust_remote_code: bool = False
    """Allow Transformers to run code that is shipped with the model."""

    def __post_init__(self) -> None:
        check_precision("dtype", self.dtype)
        if self.device_map and self.device != "auto":
            raise ValueError(f"device_map = {self.device_map} chooses the devices: leave out device = {self.device}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaygroundConfig(LocalModel):
    """The model, its TempNet, and the port of the page."""

    port: int = 8765
    """Port on 127.0.0.1 at which the page is served; 0: any that is free."""
    max_new_tokens: int = 256
    """Maximum number of new tokens that the page may ask for."""

    def __post_init__(self) -> None:
        LocalModel.__post_init__(self)
        if not 0 <= self.port < 65536:
            raise ValueError(f"port = {self.port} must lie between 0 and 65535")
        check_least(self, max_new_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig(LocalModel):
    """The model, the prompts, the temperature, and where the texts are written."""

    prompts: str = field(metadata=FREE_TO_CHANGE)
    """The file of prompts, a path or URI, in the format that `--format` names."""
    output: str = field(metadata=FREE_TO_CHANGE)
    """The file to write, a path or URI. One that was made with the same settings is continued: the texts it already
    holds are kept."""
    format: Literal["text", "alpaca-eval", "mt-bench", "gsm8k"] = "text"
    """Format of the prompts. text: `.txt` with one prompt per line, or JSONL with `prompt` (and optionally `id`).
    The others: the files of those benchmarks."""
    temperature: str = "auto"
    """Temperature. tempnet: predicted for every token; a number: that constant; greedy: always the most likely
    token. auto: tempnet if the model has one, else 1."""
    beside: tuple[str, ...] = field(default=(), metadata=FREE_TO_CHANGE)
    """Temperatures, numbers or greedy, at which the prompts are answered too, each in a file of its own beside `output`.
    Scores are printed for each, and `--html` shows the texts of a prompt under one another."""
    tau_max_eval: float | None = None
    """τ_max of the TempNet for this job, which rescales all predicted temperatures. Default: the saved value."""
    top_k: int = 0
    """Draw only among the k most likely tokens; 0: among all."""
    top_p: float = 1.0
    """Draw only among the most likely tokens that together hold this share of the probability; 1: among all."""
    min_p: float = 0.0
    """Draw only among the tokens whose probability is at least this share of the largest one; 0: among all."""
    num_samples: int = field(default=1, metadata=FREE_TO_CHANGE)
    """Number of texts to generate for every prompt."""
    max_new_tokens: int = 256
    """Maximum number of new tokens per text."""
    seed: int = 0
    """Random seed. With the prompt's id and the sample's number it fixes a text, whatever else is in the batch."""
    batch_size: int = field(default=8, metadata=FREE_TO_CHANGE)
    """Number of texts that are generated at the same time."""
    limit: int = field(default=0, metadata=FREE_TO_CHANGE)
    """Use only this many prompts, the first ones of the file; 0: all."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Whether to put prompts into the tokenizer's chat template. auto: if the tokenizer has one."""
    entropy: bool = True
    """Record the entropy of every prediction at τ = 1, in nats."""
    html: str = field(default="", metadata=FREE_TO_CHANGE)
    """Path or URI of an additional HTML page with every token coloured by its τ. Empty: no page."""
    judged: str = field(default="", metadata=FREE_TO_CHANGE)
    """File of a judge's answers to outputs of this job, of which the score is printed: `annotations.json` of alpaca_eval,
    or FastChat's `gpt-4_single.jsonl` for mt-bench. Empty: no score."""
    generator: str = field(default="", metadata=FREE_TO_CHANGE)
    """Name of the model in the output files of alpaca-eval and mt-bench. Default: the value of `--model`. Texts of
    `--beside T` have the name with ` at T`."""

    def __post_init__(self) -> None:
        LocalModel.__post_init__(self)
        check_least(self, num_samples=1, max_new_tokens=1, batch_size=1, top_k=0, limit=0)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p = {self.top_p:g} must lie in (0, 1]")
        if not 0.0 <= self.min_p < 1.0:
            raise ValueError(f"min_p = {self.min_p:g} must lie in [0, 1)")
        fixed = self.fixed_temperature
        if fixed is not None and not (fixed > 0.0 and math.isfinite(fixed)):
            raise ValueError(f"temperature = {self.temperature} must be positive; for the largest logit, say greedy")
        if (self.tempnet or self.tau_max_eval is not None) and self.temperature not in ("auto", "tempnet"):
            raise ValueError(f"temperature = {self.temperature} uses no TempNet: leave out tempnet and tau_max_eval")
        truncates = self.top_k or self.top_p < 1.0 or self.min_p
        if self.temperature == "greedy" and (self.num_samples > 1 or truncates or self.html):
            raise ValueError(
                "temperature = greedy draws nothing: num_samples, top_k, top_p, min_p and html have no meaning with it"
            )
        if self.html and not self.entropy:
            raise ValueError("html shows the entropy beside τ: leave out --no-entropy")
        if self.format == "alpaca-eval" and self.num_samples > 1:
            raise ValueError(f"num_samples = {self.num_samples}: alpaca-eval holds one output for an instruction")
        if self.judged and self.format not in ("alpaca-eval", "mt-bench"):
            raise ValueError(f"judged = {self.judged!r}: only alpaca-eval and mt-bench have a judge, not {self.format}")
        for text in self.beside:
            if text in ("auto", "tempnet", self.temperature) or self.beside.count(text) > 1:
                raise ValueError(
                    f"beside = {text}: it takes positive numbers and greedy, each once, and not temperature"
                )
        try:
            self.others()
        except ValueError as error:
            raise ValueError(f"beside: {error}") from None
        if self.beside and self.html and "greedy" in self.beside:
            raise ValueError("html colours tokens by their τ, and greedy has none: leave out one of them")

    def others(self) -> list[GenerateConfig]:
        """Return the configurations of the texts at the other temperatures."""
        stem, ending = os.path.splitext(self.output)
        name = self.generator or self.model
        return [
            dataclasses.replace(
                self,
                temperature=temperature,
                beside=(),
                tempnet="",
                tau_max_eval=None,
                html="",
                output=f"{stem}-{temperature}{ending}",
                generator=f"{name} at {temperature}",
            )
            for temperature in self.beside
        ]

    @property
    def fixed_temperature(self) -> float | None:
        """The constant temperature if `temperature` is a number, else None."""
        if self.temperature in CHOICES:
            return None
        try:
            return float(self.temperature)
        except ValueError:
            raise ValueError(
                f"temperature = {self.temperature!r} is neither a number nor one of {', '.join(CHOICES)}"
            ) from None
