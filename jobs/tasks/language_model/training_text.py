"""What text a model was trained on: recorded beside its export, and compared with text that should be new to it.

A temperature that is fitted to text which the model has learned answers for its memory, not for new text. Archives are
recognised by name and size, because their content may be too large to read for a warning.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from pipelines.archives import Archive, list_archives
from pipelines.local_copy import local_copy

TRAINING_TEXT_FILE = "training_text.json"
_NUM_NAMES_SHOWN = 3

logger = logging.getLogger(__name__)


def write_training_text(directory: Path, text: str, base: str, *, is_base_trained: bool) -> None:
    """Write the record of an exported model into its directory; nothing is written if no text is known.

    Args:
        directory: directory of the export.
        text: path or URI of the run's training text.
        base: directory, URI or hub name of the model that the run began with; empty for random weights.
        is_base_trained: whether the run trained the base model, not only its TempNet.
    """
    archives = read_training_text(base) if base else set()
    if is_base_trained:
        archives = archives | _name_and_size(list_archives(text))
    if archives:
        record = {"archives": [{"name": name, "num_bytes": size} for name, size in sorted(archives)]}
        (directory / TRAINING_TEXT_FILE).write_text(json.dumps(record, indent=1) + "\n")


def read_training_text(model: str) -> set[tuple[str, int]]:
    """Return name and size in bytes of the archives that a model was trained on; empty if that is not recorded."""
    path = Path(local_copy(model, with_weights=False)) / TRAINING_TEXT_FILE
    if not path.is_file():
        return set()
    return {(str(item["name"]), int(item["num_bytes"])) for item in json.loads(path.read_text())["archives"]}


def warn_of_known_text(model: str, text: str, archives: list[Archive], *, field: str) -> list[str]:
    """Log a warning if a model was trained on some of the archives, and return their names.

    Args:
        model: directory, URI or hub name of the model.
        text: path or URI that the archives were listed from.
        archives: the archives that should be new to the model.
        field: name of the configuration field of the text, for the message.
    """
    names = sorted(name for name, _ in read_training_text(model) & _name_and_size(archives))
    if names:
        more = len(names) - _NUM_NAMES_SHOWN
        shown = ", ".join(names[:_NUM_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        logger.warning(
            "%s = %s holds text that %s was trained on (%s): there it is surer than on new text, so what is found of its "
            "temperatures does not hold for new text. Give text that was held out",
            field,
            text,
            model,
            shown,
        )
    return names


def _name_and_size(archives: list[Archive]) -> set[tuple[str, int]]:
    return {(Path(archive.path).name, archive.num_bytes) for archive in archives}
