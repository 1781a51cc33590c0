"""Ending a run before its last step: somebody looks at every validation and may say that the rest is not worth its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Scores of a model on held-out data."""

    step: int
    scores: Mapping[str, float]


class Watch(Protocol):
    """Travels to the first worker; all that it may rely on is what it is shown, as a run can be stopped and continued."""

    def reason_to_stop(self, validations: Sequence[Validation]) -> str:
        """Why the run should end now, or nothing.

        Args:
            validations: all of this run, the last one new; never empty.
        """
        ...
