"""The configuration of an evaluation of language models: models, temperatures, tasks and workers.

Shapes: V vocabulary, "…" any leading dimensions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from jobs.scoring.config import EvaluationConfig, LanguageModelPool, check_least, check_precision
from tempnet.network import TempNet

# The value in `tempnets` for a model that is to be used without a TempNet.
NO_TEMPNET = "none"


# Maps float32 logits (…, V) and the hidden states (…, d) that they were computed from to temperatures (…,).
TemperatureFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """A temperature to evaluate at; it forms one column of the results for every model."""

    name: str
    """Its normal form: `one`, `fixed:0.7`, `tempnet` or `tempnet:1.5`."""
    needs_tempnet: bool
    value: float | None
    """The constant temperature; or, for a TempNet, τ_max at inference, where None keeps the network's own."""

    @classmethod
    def parse(cls, text: str) -> Temperature:
        """Parse a temperature from the command line (ValueError)."""
        kind, _, number = text.partition(":")
        try:
            value = float(number) if number else None
        except ValueError:
            value = -1.0
        is_legal = value is None if kind == "one" else kind == "tempnet" or (kind == "fixed" and value is not None)
        if not is_legal or (value is not None and not 0.0 < value < float("inf")):
            raise ValueError(
                f"temperature {text!r} is none of: one, fixed:VALUE, tempnet, tempnet:TAU_MAX, with positive numbers"
            )
        if kind == "one":
            value = 1.0
        name = kind if not number else f"{kind}:{value:g}"
        return cls(name=name, needs_tempnet=kind == "tempnet", value=value)

    def function(self, network: TempNet | None) -> TemperatureFunction:
        """Returns the function that maps logits and hidden states to τ."""
        if not self.needs_tempnet:
            value = self.value
            assert value is not None
            return lambda logits, hidden: torch.full(logits.shape[:-1], value, device=logits.device)
        assert network is not None
        variant = copy.copy(network)  # a shallow copy: the same parameters with a configuration of its own
        if self.value is not None:
            variant.set_tau_max_eval(self.value)
        return variant


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig(EvaluationConfig):
    """The models, temperatures and tasks; every model is evaluated at every temperature on every task."""

    models: tuple[str, ...]
    """Directories, URIs or hub names of Transformers causal LMs, such as exports of `train_lm`."""
    tempnets: tuple[str, ...] = ()
    """The TempNets of the models, in order; `none` for a model without. Default: `tempnet/` in each model's directory."""
    temperatures: tuple[str, ...] = ("one",)
    """Temperatures: one (τ = 1), fixed:VALUE, tempnet, or tempnet:TAU_MAX, which replaces the TempNet's τ_max."""
    wikitext: str = ""
    """Text file for the word perplexity; WikiText headings `= Title =` split it into documents. Empty: none."""
    detokenize: bool = True
    """Undo WikiText's tokenisation (`1 @,@ 000 ,`) before scoring, as the harness does. Words are counted before."""
    lambada: str = ""
    """JSONL file with a field `text`, whose last word is to be predicted. Empty: none."""
    tasks: tuple[str, ...] = ()
    """Names of tasks, groups or tags of lm-evaluation-harness."""
    include_path: str = ""
    """Directory with your own task files (YAML). It must be trusted: functions that the files name are run."""
    data_dir: str = ""
    """Directory that the `data_files` of tasks on local files are relative to. Default: the working directory."""
    limit: int = 0
    """Use only this many documents of each task, the first ones. 0: all."""
    num_fewshot: int = -1
    """Number of solved examples before each question of a harness task. -1: the task's own default."""
    document_start: bool = True
    """Put the document-start token before every context, as in training. False: only where the context is empty or
    the tokenizer adds it by itself, which is how published figures of GPT-2 were computed."""
    max_length: int = 0
    """Maximum number of tokens that a model reads at once. 0: all of its positions."""
    batch_size: int = 8
    """Number of sequences per forward pass."""
    dtype: Literal["float32", "bfloat16", "float16", "int8", "fp8"] = "float32"
    """Data type of the base model; int8, fp8: weights in eight bits, by torchao. Softmax and TempNet are always float32."""
    trust_remote_code: bool = False
    """Allow Transformers to run code that is shipped with a model."""
    workers: LanguageModelPool = field(default_factory=LanguageModelPool)

    def __post_init__(self) -> None:
        EvaluationConfig.__post_init__(self)
        if self.tempnets and len(self.tempnets) != len(self.models):
            raise ValueError(
                f"tempnets names {len(self.tempnets)} networks for {len(self.models)} models: "
                f"one a model is needed ({NO_TEMPNET!r} for a model without)"
            )
        if not (self.wikitext or self.lambada or self.tasks):
            raise ValueError("nothing to evaluate on: give wikitext, lambada or tasks")
        check_precision("dtype", self.dtype)
        check_least(self, limit=0, num_fewshot=-1, max_length=0, batch_size=1)
        for name in ("wikitext", "lambada", "include_path", "data_dir"):
            kind, is_there = ("file", Path.is_file) if name in ("wikitext", "lambada") else ("directory", Path.is_dir)
            if (path := getattr(self, name)) and "://" not in path and not is_there(Path(path)):
                raise ValueError(f"{name} = {path!r} is no {kind}")
        if not self.temperatures:
            raise ValueError("temperatures is empty: name one, tempnet, fixed:VALUE or several")
        for name, values in (("temperatures", [column.name for column in self.columns]), ("tasks", self.tasks)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} = {' '.join(values)} names something twice")

    @property
    def columns(self) -> list[Temperature]:
        return [Temperature.parse(text) for text in self.temperatures]
