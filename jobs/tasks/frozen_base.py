"""Keeps a run that has begun on a frozen model from going on with another one of the same name."""

from __future__ import annotations

from pathlib import Path

from jobs.engine.config import TrainingConfig
from jobs.engine.failures import FatalTrainingError
from pipelines.storage import read_json
from tempnet.base_model import BASE_FILE, BaseReference, read_reference


def check_continues(config: TrainingConfig, path: str, found: BaseReference) -> None:
    """Check that the run's directory, if the run has begun before, names the frozen model that is there now.

    Args:
        config: configuration of the run.
        path: `model.path` of the run.
        found: the model that is there now.

    Raises:
        ValueError: if it names another one; the message names the field and the run.
    """
    held = read_json(f"{config.run.directory}/{BASE_FILE}")
    if held is None:
        return
    try:
        BaseReference(path=found.path, digest=held["digest"]).check(found.digest)
    except ValueError as error:
        raise ValueError(
            f"model.path = {path!r}: run.name = {config.run.name!r} cannot continue: {error}; or choose another run.name"
        ) from error


def check_checkpoint(directory: Path, base: BaseReference | None) -> None:
    """Check that a checkpoint was written on the frozen model of this run; None: the run has none.

    Raises:
        FatalTrainingError: if it was written on another one.
    """
    written_on = read_reference(directory)
    if base is not None and written_on is not None:
        try:
            written_on.check(base.digest)
        except ValueError as error:
            raise FatalTrainingError(str(error)) from error
