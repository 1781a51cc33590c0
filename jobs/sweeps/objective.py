"""What a sweep looks for among the trials in the band."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A score of the validation that decides among the trials in the band."""

    score: str
    """Of the validation."""
    title: str
    is_better_higher: bool

    @property
    def sign(self) -> float:
        """What makes the higher the better of it."""
        return 1.0 if self.is_better_higher else -1.0
