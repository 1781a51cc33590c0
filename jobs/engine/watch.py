"""Early stopping: a watch sees the scores of every validation and may end the run before its last step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Scores of a model on held-out data after some step."""

    step: int
    """Number of optimizer steps that the model was trained for."""
    scores: Mapping[str, float]
    """Name of each score → its value."""


class Watch(Protocol):
    """Decides on rank 0 whether to end a run early.

    It must keep no state of its own, because a run can be interrupted and continued: it may use only its arguments.
    """

    def reason_to_stop(self, validations: Sequence[Validation]) -> str:
        """Return why the run should end now; empty if it should not.

        Args:
            validations: all validations of this run so far, the newest last; never empty.
        """
        ...
