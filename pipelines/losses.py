"""Write every record that is lost while data is prepared to JSON lines files, one file per archive.

A "loss" here is lost data, not a training loss. Each file is written while its archive is read and is stored beside
the prepared data, so that the losses can be listed later at any time, in the order of the archives, no matter how
many archives were read in parallel.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from pipelines.problems import Problem, note
from pipelines.storage import resolve

_COPY_BYTES = 2**20


class Losses:
    """Count the lost records of one archive by kind, keep the first few as examples, and write all of them to a file.

    This is a context manager; the file is complete when the context exits.
    """

    def __init__(self, uri: str) -> None:
        filesystem, path = resolve(uri)
        self._stream = filesystem.open_output_stream(path)

    def __enter__(self) -> Losses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.close()

    def add(self, archive: str, problem: Problem, problems: Counter[str], examples: list[str]) -> None:
        """Count a problem and write it to the file.

        Args:
            archive: path of the archive that contains the problem.
            problem: the problem to record.
            problems, examples: counts and examples, which are updated in place as by `note`.
        """
        note(problem, problems, examples)
        line = {
            "kind": problem.kind,
            "archive": archive,
            "where": problem.where,
            "message": problem.detail,
            "count": problem.count,
        }
        self._stream.write(json.dumps(line).encode() + b"\n")


def losses_name(prepared: str) -> str:
    """Return the name (or URI) of the file of losses that belongs to a prepared file of this name (or URI)."""
    return f"{prepared}.losses.jsonl"


def list_losses(directory: str, files: Sequence[str], destination: str) -> None:
    """Concatenate several files of losses of a prepared directory into one file.

    Args:
        directory: path or URI of the prepared directory.
        files: names of the files to read, relative to `directory`, in the order in which they are concatenated.
        destination: path or URI of the file to write. Its directory must exist; an existing file is replaced.

    Raises:
        OSError: if `destination` cannot be written.
    """
    target, target_path = resolve(destination)
    with target.open_output_stream(target_path) as sink:
        for file in files:
            filesystem, path = resolve(f"{directory}/{file}")
            with filesystem.open_input_stream(path) as stream:
                while data := stream.read(_COPY_BYTES):
                    sink.write(data)
