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
