"""The error of an evaluation that could not be completed."""

from __future__ import annotations


class EvaluationFailedError(RuntimeError):
    """Part of an evaluation failed; the finished parts are kept."""

    def __init__(self, message: str, table: str = "") -> None:
        super().__init__(message)
        self.table = table
        """The table of all results that could be computed; empty if there is none."""
