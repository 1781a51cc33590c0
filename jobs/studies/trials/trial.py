"""A trial, that is, a training run to be made; the outcomes of trials; and rounds of trials."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jobs.engine.config import TrainingConfig
from jobs.engine.task import Plan
from jobs.engine.watch import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A training run to be made."""

    config: TrainingConfig
    make_plan: Callable[[Any], Plan]
    keep_checkpoints: bool = True
    """Whether to keep the checkpoints; False: they are deleted once the run has an outcome."""
    watch: Watch | None = None
    """A rule that may end the run early; None: it runs to its end."""

    @property
    def name(self) -> str:
        """Name of the run, unique within its storage."""
        return self.config.run.name

    def with_tracking_uri(self, uri: str) -> Trial:
        """Returns the same trial with another URI of the MLflow store."""
        tracking = dataclasses.replace(self.config.tracking, uri=uri)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, tracking=tracking))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The outcomes of the trials, in the order in which the trials were requested."""

    finished: Mapping[str, dict[str, Any]]
    """Name of a finished trial → its outcome."""
    failed: Mapping[str, str]
    """Name of a failed trial → its error."""


Rounds: TypeAlias = Generator[Sequence[Trial], Outcomes, None]
"""Generator that yields the trials of a round, which may run concurrently, and is sent the outcomes of all so far."""


def one_round(trials: Sequence[Trial]) -> Rounds:
    """Yields all trials in a single round."""
    yield trials
