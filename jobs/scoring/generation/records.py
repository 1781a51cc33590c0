"""The file of generated texts: JSON lines that are appended batch by batch and read again when the job is repeated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# (id of the prompt, number of the sample, number of the turn), the numbers counted from 0.
Key = tuple[int | str, int, int]


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Returns a hash of the settings, as 16 hex digits."""
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


class RecordFile:
    """The records of texts that were generated with one group of settings; only whole lines are appended.

    `<file>.settings.json` beside the file holds the settings whose hash is stored in every record.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Read the existing records. An incomplete last line, left by an interruption, is removed from the file.

        Raises:
            OSError: if the file cannot be read or written.
            ValueError: if the file holds anything other than records of this job, or records made with other settings.
        """
        self.path = path
        self.settings_path = path.with_name(f"{path.name}.settings.json")
        self.settings = settings_hash(settings)
        self.records: dict[Key, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.decode(errors="replace").split("\n")[:-1], 1):
            self._take(line, number, settings)
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        self.settings_path.write_text(json.dumps({"hash": self.settings, "settings": settings}, indent=2) + "\n")

    def _take(self, line: str, number: int, settings: Mapping[str, Any]) -> None:
        try:
            record = json.loads(line)
            key, its_settings = (record["id"], record["sample"], record["turn"]), record["settings"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} line {number} is no record of this job: give another output") from error
        if its_settings != self.settings:
            raise ValueError(
                f"{self.path} holds texts of other settings ({self._difference(settings)}): one file holds texts of one "
                "kind; give another output, or delete it"
            )
        self.records[key] = record

    def _difference(self, settings: Mapping[str, Any]) -> str:
        if not self.settings_path.is_file():
            return f"{self.settings_path.name} is missing"
        before = json.loads(self.settings_path.read_text())["settings"]
        names = sorted(name for name in {*before, *settings} if before.get(name) != settings.get(name))
        return "; ".join(f"{name} was {before.get(name)!r}, is {settings.get(name)!r}" for name in names)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records to the file."""
        with self.path.open("a", encoding="utf-8") as file:
            for record in records:
                record = {**record, "settings": self.settings}
                self.records[record["id"], record["sample"], record["turn"]] = record
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
