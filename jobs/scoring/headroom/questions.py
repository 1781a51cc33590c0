"""What the job asks: a question is one headroom test, and a measurement makes what its questions are answered from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tempnet.headroom.run import HeadroomTest


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One headroom test: where its measured predictions are, in which words it is reported, and in which unit of τ."""

    name: str
    """Key of its figures in headroom.json and in MLflow; empty if there is only one question, whose figures have no key."""
    title: str
    """Heading of its table; empty for none."""
    files: tuple[str, ...]
    """Names of its tables in the output, in order."""
    noun: str
    """What would have a temperature of its own: token, image, caption."""
    case: str
    """What the gains are means over: token, pair."""
    document: str
    """What the folds and the interval are over: document, image."""
    candidate: str
    """What the probabilities are distributed over: token, image, caption."""
    features: Mapping[str, str]
    """Feature set → its name in the table."""
    unit_tau: float = 1.0
    """Temperature that the logits were divided by before they were measured: τ = 1 of the test is this temperature."""
    with_end: bool = True
    """Whether end-of-text tokens are among the predictions."""
    own_name: str
    """Name of the temperature at which the model predicts by itself, which is `unit_tau`; empty if it has none."""


class Measurement(Protocol):
    """Held-out data and a model, checked, and how predictions are measured."""

    @property
    def kind(self) -> str:
        """Name of the data set in MLflow: text, images."""

    @property
    def source(self) -> str:
        """Path or URI of the data."""

    @property
    def warning(self) -> str:
        """Why the verdict may not hold, in a sentence; empty if nothing is known against it."""

    def record(self) -> dict[str, Any]:
        """Returns everything that decides what is measured, as a flat mapping."""

    def measure(self, output: str) -> list[Question]:
        """Measure what is missing in `output`, and return the questions with the names of all tables.

        Raises:
            ValueError: if the data or the model cannot be used, which is seen only once they are read.
            ScoringFailedError: naming everything that failed; what was finished is kept.
            TooManyProblemsError: if too many records are unreadable.
        """

    def facts(self, output: str, questions: Sequence[Question]) -> dict[str, Any]:
        """Returns what headroom.json says of the data beside the figures."""

    def advice(self, test: HeadroomTest, question: Question) -> str:
        """Returns the command that realises what the test has found, with a line before it; empty if there is none."""
