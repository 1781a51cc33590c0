"""What a job refuses before it starts Ray.

A run and its `--dry-run` call the same functions, so that a dry run refuses exactly what the run would. They leave nothing
behind.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path
from typing import Any, Protocol

from pyarrow.fs import LocalFileSystem

from jobs.engine.config import RunSection, TrainingConfig
from jobs.engine.identity import differences, recorded_values
from jobs.engine.masking import masked
from jobs.engine.resumption import check_start, find_resumption, whole_checkpoints
from jobs.engine.task import Plan
from jobs.engine.tracking import SQLITE, check_experiment, sqlite_file
from pipelines.storage import exists, join, read_json, resolve, write_bytes


class Named(Protocol):
    """The configuration of a run, or of a group of runs, that has a section `run`."""

    @property
    def run(self) -> RunSection:
        """The name and the directories of the run."""
        ...


def check_plan(plan: Plan) -> dict[str, Any] | None:
    """Check that a training run can be started, and return its outcome if it is finished already."""
    config = plan.config
    outcome = check_directory(config)
    if outcome is None:
        if not find_resumption(config.run.directory, {}).checkpoints:  # raises if the run cannot be continued
            check_start(config)
        check_writable("run.export", config.run.export_directory)
        if plan.tracking_uri.startswith(SQLITE):
            check_writable("tracking.uri", str(sqlite_file(plan.tracking_uri).parent))
        if plan.tracking_uri:
            check_experiment(plan.tracking_uri, config.tracking.experiment)
        if not config.workers.local:
            from jobs.engine.cluster import check_machine

            check_machine()
            check_room(config, plan.data_cpus)
    return outcome


def check_directory(config: Named) -> dict[str, Any] | None:
    """Check that the name of a run is not taken and that its storage can be written; return the outcome of a finished run."""
    outcome = find_outcome(config)
    if outcome is None:
        check_writable("run.storage", config.run.directory)
        if not exists(config.run.prepared_directory):  # what is prepared already may lie where nothing can be written
            check_writable("run.prepared", config.run.prepared_directory)
    return outcome


def find_outcome(config: Named) -> dict[str, Any] | None:
    """Return the outcome of a finished run; None if the run is not finished or has not been started."""
    directory = config.run.directory
    held = read_json(f"{directory}/configuration.json")
    if held is None:
        if checkpoints := whole_checkpoints(directory):
            raise ValueError(
                f"run.name = {config.run.name!r}: {directory} holds {', '.join(checkpoints)}, but not the "
                "configuration.json that they were made with: bring it back, delete the directory, or choose another run.name"
            )
        return None
    if changed := differences(masked(held), recorded_values(config)):
        raise ValueError(
            f"run.name = {config.run.name!r} is taken in {config.run.resolved_storage} by another configuration: "
            f"{'; '.join(changed)}. Choose another run.name, or delete {directory}"
        )
    return read_json(f"{directory}/outcome.json")


def check_writable(field: str, uri: str) -> None:
    """Check that files can be written into a directory, which need not exist yet."""
    filesystem, path = resolve(uri)
    try:
        if isinstance(filesystem, LocalFileSystem):
            place = Path(path)
            while not os.path.lexists(place):
                place = place.parent
            # A file without a name, where the file system has such files: nothing is left even if this process is killed.
            with tempfile.TemporaryFile(dir=place):
                return
        trial = f".write-{uuid.uuid4().hex}"
        write_bytes(join(uri, trial), b"")
        filesystem.delete_file(f"{path}/{trial}")
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if isinstance(error, FileNotFoundError) and error.errno:
            reason = "that file system takes no files"  # such as /proc
        raise type(error)(
            f"{field}: nothing can be written in {uri}: {reason}. Give another directory or URI"
        ) from error


def check_room(config: TrainingConfig, data_cpus: float) -> None:
    """Check that this machine has the CPUs and GPUs of a run, if it is here that the job will start Ray."""
    workers = config.workers
    if workers.local:
        raise ValueError("workers.local = True is for one training run: this job runs several, with Ray; leave it out")
    if not os.environ.get("RAY_ADDRESS"):
        from jobs.engine import cluster, ray_private

        cluster.check_resources(
            num_workers=workers.min_workers,
            cpus_per_worker=workers.cpus_per_worker,
            use_gpu=workers.use_gpu,
            data_cpus=data_cpus * workers.min_workers / workers.max_workers,
            total=ray_private.local_resources(),
        )
