"""What keeps an evaluation from being whole."""

from __future__ import annotations


class EvaluationFailedError(RuntimeError):
    """A part of an evaluation failed; what was finished is kept."""

    def __init__(self, message: str, table: str = "") -> None:
        super().__init__(message)
        self.table = table
        """Of all that did not fail, where the other parts were finished."""
