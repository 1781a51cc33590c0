"""What runs that start at the same moment do in one MLflow store: make its tables, their experiment and their data sets.

MLflow looks whether each of these exists and then makes it, so that of two processes that do so together one fails, and
would lose a training run for it. Here the second one waits, or finds what the first one has made.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Experiment, InputTag, LifecycleStage
from mlflow.exceptions import MlflowException

from jobs.engine.masking import masked
from pipelines.block_cache import open_locked

SQLITE = "sqlite:///"
_NUM_ATTEMPTS = 5


class DeletedExperimentError(ValueError):
    """The experiment was deleted, but not for ever, and nothing can be logged to it."""


def sqlite_uri(file: str) -> str:
    """Return the URI of a file of SQLite, with the characters escaped that SQLAlchemy would read as something else."""
    return SQLITE + file.replace("%", "%25").replace("?", "%3F")


def sqlite_file(uri: str) -> Path:
    """Return the file that the URI of SQLite names."""
    return Path(unquote(uri.removeprefix(SQLITE).partition("?")[0]))


def open_client(uri: str) -> MlflowClient:
    """Return a client of a server or of a file of SQLite, which is made if it does not exist.

    Raises:
        MlflowException: if the store cannot be opened.
    """
    if not uri.startswith(SQLITE):
        return MlflowClient(uri)
    file = sqlite_file(uri)
    file.parent.mkdir(parents=True, exist_ok=True)
    # The client makes the tables, in many steps of which none may be made twice.
    lock = open_locked(file.with_name(f"{file.name}.lock"), os.O_CREAT, waits=True)
    assert lock is not None  # nothing removes it
    with lock:
        client = MlflowClient(uri)
    if str(file) not in uri:  # MLflow makes a directory of the name as the URI spells it.
        with suppress(OSError):
            os.removedirs(Path(uri.removeprefix(SQLITE)).parent)
    return client


def find_or_create_experiment(client: MlflowClient, uri: str, name: str) -> str:
    """Return the ID of the experiment; the artifacts of a new one lie beside the file of SQLite, or at the server.

    Raises:
        DeletedExperimentError: if it was deleted.
        MlflowException: if the store refuses it.
    """
    location = (sqlite_file(uri).parent / "mlartifacts").as_uri() if uri.startswith(SQLITE) else None
    existing = client.get_experiment_by_name(name)
    if existing is None:
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException:
            existing = client.get_experiment_by_name(name)  # another process may have made it
            if existing is None:
                raise
    _refuse_deleted(existing, uri)
    return str(existing.experiment_id)


def check_experiment(uri: str, name: str) -> None:
    """Check that runs can be logged to an experiment, which need not exist; a file of SQLite is not made.

    Raises:
        DeletedExperimentError: if it was deleted.
    """
    if uri.startswith(SQLITE) and not sqlite_file(uri).exists():
        return
    with suppress(MlflowException):  # a store that cannot be opened has its own message
        _refuse_deleted(open_client(uri).get_experiment_by_name(name), uri)


def _refuse_deleted(experiment: Experiment | None, uri: str) -> None:
    if experiment and experiment.lifecycle_stage == LifecycleStage.DELETED:
        raise DeletedExperimentError(
            f"tracking.experiment = {experiment.name!r} was deleted in MLflow, which keeps it and its name: bring it back "
            f"by MLFLOW_TRACKING_URI={shlex.quote(masked(uri))} mlflow experiments restore -x {experiment.experiment_id}, "
            "or log to another one by --tracking.experiment NAME"
        )


def log_data_sets(client: MlflowClient, run_id: str, data_sets: Mapping[str, tuple[str, str, str]]) -> None:
    """Log the inputs of a run: context → (name, digest, source URI).

    Raises:
        MlflowException: if the store refuses them.
    """
    inputs = [_describe_input(context, *data) for context, data in data_sets.items()]
    for attempt in range(1, _NUM_ATTEMPTS + 1):
        try:
            client.log_inputs(run_id, inputs)
            return
        except MlflowException:  # another process may have made one of the data sets, and the next attempt will find it
            if attempt == _NUM_ATTEMPTS:
                raise


def _describe_input(context: str, name: str, digest: str, source: str) -> DatasetInput:
    place = json.dumps({"uri": masked(source)})
    return DatasetInput(
        dataset=Dataset(name=name, digest=digest, source_type="uri", source=place),
        tags=[InputTag("mlflow.data.context", context)],
    )
