"""The file of generated texts: JSON lines that are added batch by batch and read again when the job is repeated."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipelines.storage import exists, read_bytes, read_json, write_bytes, write_json

# (id of the prompt, number of the sample, number of the turn), the numbers counted from 0.
Key = tuple[int | str, int, int]

_SECONDS_BETWEEN_UPLOADS = 30.0


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Returns a hash of the settings, as 16 hex digits."""
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


class RecordFile:
    """The records of texts that were generated with one group of settings; only whole lines are added.

    `<file>.settings.json` beside the file holds the settings whose hash is stored in every record. Lines are appended
    to a local file. Nothing can be appended to an object at a URI, so it is written anew, at most every 30 seconds, and
    by :meth:`save`.
    """

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        """Read the existing records. An incomplete last line, left by an interruption, is removed from the file.

        Args:
            path: local path or URI of the file.
            settings: everything beside the prompt that decides a text.

        Raises:
            OSError: if the file cannot be read or written.
            ValueError: if the file holds anything other than records of this job, or records made with other settings.
        """
        self.path = path
        self.settings_path = f"{path}.settings.json"
        self.settings = settings_hash(settings)
        self.records: dict[Key, dict[str, Any]] = {}
        self._is_local = "://" not in path
        if self._is_local:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        content = read_bytes(path) if exists(path) else b""
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.decode(errors="replace").split("\n")[:-1], 1):
            self._take(line, number, settings)
        if len(whole) < len(content):
            write_bytes(path, whole)
        # What a URI is to hold, and when it was written.
        self._content, self._num_saved, self._saved_at = bytearray(whole), len(whole), time.monotonic()
        write_json(self.settings_path, {"hash": self.settings, "settings": settings})

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
        if (known := read_json(self.settings_path)) is None:
            return f"{self.settings_path} is missing"
        before = known["settings"]
        names = sorted(name for name in {*before, *settings} if before.get(name) != settings.get(name))
        return "; ".join(f"{name} was {before.get(name)!r}, is {settings.get(name)!r}" for name in names)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add records to the file."""
        lines = bytearray()
        for record in records:
            record = {**record, "settings": self.settings}
            self.records[record["id"], record["sample"], record["turn"]] = record
            lines += (json.dumps(record, ensure_ascii=False) + "\n").encode()
        if self._is_local:
            with Path(self.path).open("ab") as file:
                file.write(lines)
            return
        self._content += lines
        if time.monotonic() - self._saved_at > _SECONDS_BETWEEN_UPLOADS:
            self.save()

    def save(self) -> None:
        """Write what the object at a URI does not hold yet; a local file holds everything."""
        if not self._is_local and len(self._content) > self._num_saved:
            write_bytes(self.path, bytes(self._content))
            self._num_saved, self._saved_at = len(self._content), time.monotonic()
