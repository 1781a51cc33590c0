"""The configuration, that is, the command line, of `jobs.calibrate headroom`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.config import RunSection, TrackingSection
from jobs.scoring.config import LanguageModelPool, check_least, check_precision, check_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """Measure what a temperature per token could gain over the best constant on held-out text; nothing is trained."""

    model: str
    """Directory, URI or hub name of a Transformers causal LM."""
    text: str
    """Text that the model was not trained on: an archive or plain text, or a directory of these; a path or URI. The
    interval is over its documents, of which there must be at least as many as folds."""
    output: str = "headroom"
    """Directory or URI of headroom.json, reliability.png and the measured tokens. A repeated run measures only what is
    missing. A token takes 170 bytes and two for each unit of the hidden state, before compression."""
    folds: int = 5
    """Number of folds of documents, at least 3: a document is judged by what was fitted to other folds."""
    least_gain: float = 1.0
    """Gain, in thousandths of a nat per token, that the verdict calls worth it if the whole interval lies above."""
    tokens_per_document: int = 1024
    """Number of tokens of a document that are measured, from its beginning."""
    max_documents: int = 0
    """Maximum number of documents read from each archive. 0: all."""
    context_length: int = 0
    """Number of positions that the model reads at once. 0: all that it was built for."""
    stride: int = 0
    """Tokens between the starts of a long document's windows, 1 … context_length. 0: half of context_length."""
    batch_size: int = 16
    """Number of windows per forward pass."""
    precision: Literal["fp32", "bf16", "int8", "fp8"] = "fp32"
    """Precision of the model; int8, fp8: weights in eight bits, products in bfloat16, by torchao."""
    text_field: str = "text"
    """Name of the field or column that contains the text."""
    part_characters: int = 200_000
    """Characters per part. A part is measured, written and resumed as a unit."""
    max_bad_share: float = 0.01
    """Largest share of records, in [0, 1], that may be unreadable before the job fails."""
    storage: str = ""
    """Directory or URI of the MLflow store. Default: $TEMPNET_HOME, else ./runs."""
    workers: LanguageModelPool = field(default_factory=LanguageModelPool)
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="headroom"))

    def __post_init__(self) -> None:
        check_least(
            self,
            folds=3,
            tokens_per_document=1,
            max_documents=0,
            context_length=0,
            stride=0,
            batch_size=1,
            part_characters=1,
        )
        check_precision("precision", self.precision)
        check_share("max_bad_share", self.max_bad_share)
        if not self.least_gain >= 0:
            raise ValueError(f"least_gain = {self.least_gain:g} must not be negative")
        if not self.output:
            raise ValueError("output is empty: name a directory or URI for the results")
        _ = self.run.resolved_storage

    @property
    def run(self) -> RunSection:
        """Name and storage as the section that training runs use, checked by the same rules."""
        return RunSection(name="headroom", storage=self.storage)
