"""What a sweep remembers of itself from one start to the next, beside what its trials have left."""

from __future__ import annotations

from collections.abc import Mapping

from jobs.studies.sweeps.search import Point
from pipelines.storage import read_json, write_json


class Course:
    """The rounds that a sweep has come to, in `rounds.json` beside its trials.

    A search that is made again asks for the same trials, as long as the same comes of them. One that failed would be tried
    again, might end well this time, and lead to other rounds: what was trained in the later ones would be lost. So a failure
    that the search has gone on from stands; one in the last round is tried again.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._rounds: list[dict[str, str]] = []  # name → error, empty where there was none
        self._before: list[dict[str, str]] = (read_json(self._record) or {"rounds": []})["rounds"]
        self.points: dict[str, Point] = {}
        """Name → point, of all trials."""
        self.settled = self._settled()
        """Name → error of those that are not tried again."""

    @property
    def _record(self) -> str:
        return f"{self._directory}/rounds.json"

    def _settled(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for number, one in enumerate(self._before):
            later = [name for names in self._before[number + 1 :] for name in names]
            if any(self._has_begun(name) for name in later):
                found |= {name: error for name, error in one.items() if error}
        return found

    def _has_begun(self, name: str) -> bool:
        files = ("outcome.json", "checkpoint_manager_snapshot.json")
        return any(read_json(f"{self._directory}/{name}/{file}") is not None for file in files)

    def begin(self, points: Mapping[str, Point]) -> None:
        """A round of these."""
        self.points |= points
        self._rounds.append(dict.fromkeys(points, ""))
        self.save(self.settled)

    def save(self, failed: Mapping[str, str]) -> None:
        """What failed so far, with what was known of later rounds before."""
        self._rounds = [{name: failed.get(name, error) for name, error in one.items()} for one in self._rounds]
        write_json(self._record, {"rounds": [*self._rounds, *self._before[len(self._rounds) :]]})
