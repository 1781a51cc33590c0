"""Everything that was lost in preparing data, as JSON lines: a file for each archive, written as it is read.

The files lie beside the prepared data, so that losses can be listed at any time after, in the order of the archives, however
many of these were read at once.
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
    """What was lost of one archive: counted by kind, the first few remembered, and all of them written to a file.

    A context manager; the file is complete when it is left.
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
        """Count and write a problem.

        Args:
            archive: path of the archive that it lies in.
            problems, examples: as `note` changes them.
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
    """The name, or URI, of the losses beside what was prepared."""
    return f"{prepared}.losses.jsonl"


def list_losses(directory: str, files: Sequence[str], destination: str) -> None:
    """Write the losses in some files of a prepared directory, one after the other, into one.

    Args:
        destination: path or URI of the file, whose directory exists; it is replaced.

    Raises:
        OSError: if it cannot be written.
    """
    target, target_path = resolve(destination)
    with target.open_output_stream(target_path) as sink:
        for file in files:
            filesystem, path = resolve(f"{directory}/{file}")
            with filesystem.open_input_stream(path) as stream:
                while data := stream.read(_COPY_BYTES):
                    sink.write(data)
