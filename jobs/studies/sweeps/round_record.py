"""The record of a sweep's rounds and failures, which is kept from one start of the sweep to the next."""

from __future__ import annotations

from collections.abc import Mapping

from jobs.studies.sweeps.search import Point
from pipelines.storage import read_json, write_json


class RoundRecord:
    """The rounds of a sweep so far, stored in `rounds.json` beside its trials.

    When a sweep is continued, its search is repeated, and requests the same trials as long as these have the same
    outcomes. If a failed trial were tried again, it might succeed this time and lead to other rounds, so that the
    training of the later rounds would be lost. Therefore a failure is final once trials of a later round have begun; a
    failed trial of the last round is tried again.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._rounds: list[dict[str, str]] = []  # name → error, or an empty string if there was none
        self._earlier_rounds: list[dict[str, str]] = (read_json(self._file) or {"rounds": []})["rounds"]
        self.points: dict[str, Point] = {}
        """Name → point, for all trials."""
        self.final_failures = self._find_final_failures()
        """Name → error of the failed trials that are not tried again."""

    @property
    def _file(self) -> str:
        return f"{self._directory}/rounds.json"

    def _find_final_failures(self) -> dict[str, str]:
        failures: dict[str, str] = {}
        for number, errors in enumerate(self._earlier_rounds):
            later = [name for names in self._earlier_rounds[number + 1 :] for name in names]
            if any(self._has_begun(name) for name in later):
                failures |= {name: error for name, error in errors.items() if error}
        return failures

    def _has_begun(self, name: str) -> bool:
        files = ("outcome.json", "checkpoints.json")
        return any(read_json(f"{self._directory}/{name}/{file}") is not None for file in files)

    def begin(self, points: Mapping[str, Point]) -> None:
        """Begin a round of these points."""
        self.points |= points
        self._rounds.append(dict.fromkeys(points, ""))
        self.save(self.final_failures)

    def save(self, failed: Mapping[str, str]) -> None:
        """Save the failures so far, and keep the records of later rounds from earlier starts."""
        self._rounds = [{name: failed.get(name, error) for name, error in errors.items()} for errors in self._rounds]
        write_json(self._file, {"rounds": [*self._rounds, *self._earlier_rounds[len(self._rounds) :]]})
