"""What ends an evaluation early."""

from __future__ import annotations


class EvaluationFailedError(RuntimeError):
    """A part of an evaluation failed; what was finished before is kept."""
