"""What to predict temperatures of, with which model, and how: the command line of `jobs.predict_temperatures`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionWorkers:
    """Processes that hold the model."""

    num_workers: int = 1
    """Copies of the model; each predicts whole parts."""
    use_gpu: bool = False
    """One GPU a worker."""
    cpus_per_worker: float = 1.0
    """CPUs (and PyTorch threads) of a worker; reading and writing need 1 beside them."""

    def __post_init__(self) -> None:
        for name in ("num_workers", "cpus_per_worker"):
            if getattr(self, name) <= 0:
                raise ValueError(f"workers.{name} = {getattr(self, name)} must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictTemperaturesConfig:
    """A model, texts, and where the results go: tables (`output`), a page (`html`), or both."""

    model: str
    """A Transformers causal language model: directory (as `train_lm` exports it) or hub name."""
    tempnet: str = ""
    """Where its TempNet is. Default: beside the model, in `tempnet/`."""
    text: str
    """A text archive (.jsonl, .jsonl.gz, .jsonl.zst, .tar of these, .parquet) or plain UTF-8 text (.txt, .md, .rst: one
    document a file), or a directory of archives or else of plain text; a path or pyarrow URI."""
    output: str = ""
    """Directory (or URI) of the tables, one Parquet file a part; a second start goes on with the parts that are missing.
    Several machines need one that all of them reach."""
    html: str = ""
    """A page of the first documents with every token coloured by its τ. Default: temperatures.html if there is no output."""
    html_tokens: int = 4096
    """Tokens on the page, at most."""
    per_token: bool = False
    """Also write lists of token ids, τ and entropy, one element a token."""
    with_entropy: bool = True
    """Also write the entropy of the predictions at τ = 1, and its rank correlation with τ. Needs the logits."""
    context_length: int = 0
    """Positions that the model reads at once. 0: all that it was built for."""
    stride: int = 0
    """Tokens between the windows of a long document, 1 … context_length: every token is predicted once, and those after
    the first window with at least context_length − stride tokens before them. 0: half the context."""
    batch_size: int = 16
    """Windows in one forward pass."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the base model; TempNet, τ and entropy are float32."""
    text_field: str = "text"
    """The field (column) that holds the text."""
    max_documents: int = 0
    """Documents read from each archive, at most. 0: all."""
    part_characters: int = 1_000_000
    """A part ends with the document that reaches this many characters, or with its archive."""
    max_bad_share: float = 0.01
    """Share of records that may be unreadable before the job fails."""
    workers: PredictionWorkers = field(default_factory=PredictionWorkers)

    def __post_init__(self) -> None:
        for name in ("html_tokens", "batch_size", "part_characters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be positive")
        for name in ("context_length", "stride", "max_documents"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ValueError(f"max_bad_share = {self.max_bad_share:g} must lie in [0, 1]")
