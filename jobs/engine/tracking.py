"""Logging to MLflow: one MLflow run for each training run, even if it restarts; an outage never stops training.

The driver creates or finds the MLflow run, and rank 0 logs its metrics (`jobs.engine.metrics`). `MlflowClient` is used
directly because MLflow's fluent API would open a new run on every restart.
"""

from __future__ import annotations

import getpass
import json
import logging
import math
import os
import shlex
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Experiment, InputTag, LifecycleStage, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from jobs.engine.config import TrackingSection
from jobs.engine.fields import configuration_hash
from jobs.engine.masking import masked
from jobs.engine.metrics import TrackedRun, metric_name, survive_outage
from jobs.engine.revision import revision_tags
from pipelines.block_cache import open_locked
from tempnet.command import COMMAND_VARIABLE

logger = logging.getLogger(__name__)

_SECONDS_TO_ANSWER = 10
_ANSWERS_OF_MLFLOW = (401, 404)  # asks for a login; or is older than its health check
_DATABASES = ("postgresql", "mysql", "mssql")
_RUN_TAG = "tempnet.run_directory"
# Without a type MLflow shows its view for agents.
_RUNS_QUERY = "workflowType=machine_learning&compareRunsMode=CHART"


def resolve_uri(tracking: TrackingSection, storage: str) -> str:
    """Return the MLflow tracking URI, by default that of an SQLite database in the storage; empty if nothing is logged."""
    if not tracking.enabled:
        return ""
    uri = tracking.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri and "://" in storage:
        raise ValueError(
            f"tracking.uri is not given, and run.storage = {storage!r} is no local directory to keep a database in: "
            "give the URI of an MLflow server, or --tracking.no-enabled"
        )
    uri = uri or sqlite_uri(f"{storage}/mlflow.db")
    shown = masked(uri)
    if not uri.startswith(SQLITE) and any(map(str.isspace, uri)):
        raise ValueError("tracking.uri holds white space: write a space as %20")
    if not uri.startswith(("http://", "https://")):
        if not uri.startswith((SQLITE, "file:", "databricks", *_DATABASES)):
            raise ValueError(
                f"tracking.uri = {shown!r} is no address of MLflow: give http://HOST:PORT of a server, or sqlite:///PATH"
            )
        if uri.startswith(SQLITE) and not sqlite_file(uri).is_absolute():
            return sqlite_uri(f"{Path.cwd()}/") + uri.removeprefix(SQLITE)
        return uri
    try:
        parts = urllib.parse.urlsplit(f"{uri.rstrip('/')}/health")
        # The health check needs no login, which urllib would mistake for a part of the host name.
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        with urllib.request.urlopen(address, timeout=_SECONDS_TO_ANSWER):
            return uri
    except (OSError, HTTPException) as error:  # the latter: it is no server of HTTP, or the port is no number
        is_asked = not urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2])
        proxies = urllib.request.getproxies() if is_asked else {}
        proxy = proxies.get(parts.scheme, proxies.get("all", ""))
        if isinstance(error, urllib.error.HTTPError) and (not proxy or error.code in _ANSWERS_OF_MLFLOW):
            return uri  # the server answers; whether it accepts the login is checked when the run is opened
        cause = masked(str(error))
        if proxy:
            cause = f"The proxy {masked(proxy)} is asked for it: {cause}"
            cause += f". If it can be reached without, add {parts.hostname} to the variable no_proxy"
    if tracking.optional:
        logger.warning("MLflow at %s does not answer: nothing is logged", shown)
        return ""
    raise ConnectionError(
        f"MLflow at tracking.uri = {shown!r} does not answer: start it, give another one, or go on without it by "
        f"--tracking.optional or --tracking.no-enabled. {cause}"
    )


def reconnection_uri(recorded: str, tracking: TrackingSection) -> str:
    """Return the URI that a run was logged to, with its login if the command line or environment gives the same URI."""
    given = tracking.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    return given if masked(given) == recorded else recorded


def open_run(
    *,
    uri: str,
    experiment: str,
    name: str,
    directory: str,
    parameters: Mapping[str, Any],
    tags: Mapping[str, str],
    data_sets: Mapping[str, tuple[str, str, str]],
) -> TrackedRun:
    """Find the MLflow run that belongs to a run directory, or create it with its parameters, tags and inputs.

    An existing run keeps its parameters, tags and inputs, except that the ID of a Ray job that continues it is added to
    the IDs of the earlier jobs. A run of another configuration, whose directory was deleted, stays as it is.
    """
    tags = {**origin_tags(), **tags}
    try:
        client = open_client(uri)
        experiment_id = find_or_create_experiment(client, uri, experiment)
        quote = '"' if "'" in directory else "'"  # MLflow's filter strings have no escapes
        same = f"tags.`{_RUN_TAG}` = {quote}{directory}{quote}"
        if identity := tags.get("configuration_hash"):
            same += f" and tags.configuration_hash = '{identity}'"
        if existing := client.search_runs([experiment_id], filter_string=same, max_results=1):
            run_id, known = existing[0].info.run_id, existing[0].data.tags.get(JOB_TAG, "")
            client.set_terminated(run_id, status="RUNNING")
            if (job := tags.get(JOB_TAG, "")) and job not in known.split(", "):
                client.set_tag(run_id, JOB_TAG, f"{known}, {job}" if known else job)
        else:
            run_id = client.create_run(experiment_id, run_name=name, tags={_RUN_TAG: directory, **tags}).info.run_id
            client.log_batch(
                run_id, params=[Param(key, masked(str(value))[:6000]) for key, value in parameters.items()]
            )
            log_data_sets(client, run_id, data_sets)
        return TrackedRun(uri=uri, run_id=run_id, experiment_id=experiment_id)
    except MlflowException as error:  # its message may contain the login
        raise ConnectionError(f"MLflow at {masked(uri)} refuses the run {name!r}: {masked(str(error))}") from None


def where_to_browse(uri: str, experiment_id: str | None) -> str:
    """Return the lines that say how to see an experiment's charts in MLflow: an address, and a command if it needs one."""
    uri = masked(uri)
    page = f"/#/experiments/{experiment_id}/runs?{_RUNS_QUERY}" if experiment_id else ""
    if uri.startswith(("http://", "https://")):
        return f"  {uri.rstrip('/')}{page}"
    program = "mlflow" if COMMAND_VARIABLE in os.environ else ".venv/bin/mlflow"  # beside `tempnet`, or in a checkout
    command = f"{program} server --host 127.0.0.1 --port 5000 --backend-store-uri {shlex.quote(uri)}"
    return f"  {command}\n  and open http://127.0.0.1:5000{page}"


@contextmanager
def mark_if_ended(run: TrackedRun | None) -> Iterator[None]:
    """Set the status of a run and its running children to FAILED if an error, or KILLED if Ctrl-C, ends the block."""
    try:
        yield
    except BaseException as error:
        if run is not None:
            with survive_outage("the end of the run"):
                status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
                end_children(run, status)
                client = MlflowClient(run.uri)
                # Ctrl-C ends a trial with its sweep: that Ray then takes away the trial's actors is no failure of the trial.
                if client.get_run(run.run_id).info.status != "KILLED":
                    client.set_terminated(run.run_id, status=status)
        raise


def end_children(run: TrackedRun, status: str) -> None:
    """Set the status of all child runs of this MLflow run that are still running."""
    client = MlflowClient(run.uri)
    under = f"tags.`mlflow.parentRunId` = '{run.run_id}' and attributes.status = 'RUNNING'"
    for child in client.search_runs([client.get_run(run.run_id).info.experiment_id], filter_string=under):
        client.set_terminated(child.info.run_id, status=status)


def find_child(parent: TrackedRun, name: str) -> TrackedRun | None:
    """Return the child run of a name; None if there is none, or MLflow does not answer."""
    with survive_outage(f"the end of {name}"):
        under = f"tags.`mlflow.parentRunId` = '{parent.run_id}' and attributes.run_name = '{name}'"
        found = MlflowClient(parent.uri).search_runs([parent.experiment_id], filter_string=under, max_results=1)
        if found:
            return TrackedRun(uri=parent.uri, run_id=found[0].info.run_id, experiment_id=parent.experiment_id)
    return None


def finish_run(
    run: TrackedRun,
    *,
    status: str,
    artifacts: Path | str | None,
    metrics: Mapping[str, float],
    tags: Mapping[str, str] | None = None,
    note: str = "",
) -> None:
    """Close the MLflow run: log its final metrics, tags and artifacts, and set its status."""
    client = MlflowClient(run.uri)
    now = int(time.time() * 1000)
    finite = {metric_name(key): float(value) for key, value in metrics.items() if math.isfinite(value)}
    all_tags = {**(tags or {}), **({"mlflow.note.content": note} if note else {})}
    client.log_batch(
        run.run_id,
        metrics=[Metric(key, value, now, 0) for key, value in finite.items()],
        tags=[RunTag(key, value) for key, value in all_tags.items()],
    )
    if artifacts is not None:
        client.log_artifacts(run.run_id, str(artifacts))
    client.set_terminated(run.run_id, status=status)


JOB_TAG = "ray_job_id"
"""Tag with the IDs of the Ray jobs that a run was trained in."""
# Environment variable by which Ray describes a submitted job to its driver, in JSON.
_SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def run_tags(config: Any, tracking: TrackingSection) -> dict[str, str]:
    """Return tags by which a run can be found: configuration hash, preset and table of a paper; empty tags are omitted."""
    found = {"preset": tracking.preset, "paper.table": tracking.paper}
    return {"configuration_hash": configuration_hash(config), **{name: tag for name, tag in found.items() if tag}}


def ray_job_id() -> str:
    """Return the ID of the Ray job that this process drives (of a submitted one its submission ID); empty without Ray."""
    submitted = json.loads(os.environ.get(_SUBMITTED_JOB, "{}")).get("metadata", {})
    if name := submitted.get("job_submission_id", ""):
        return str(name)
    ray = sys.modules.get("ray")  # a run in this process does without it
    return str(ray.get_runtime_context().get_job_id()) if ray and ray.is_initialized() else ""


def origin_tags() -> dict[str, str]:
    """Return tags that say who started this process, with which command, in which Ray job and from which revision."""
    tags = revision_tags()
    if ray_job := ray_job_id():
        tags[JOB_TAG] = ray_job
    with suppress(OSError, KeyError):  # in a container the user ID may have no name
        tags["mlflow.user"] = getpass.getuser()
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None and module.name.startswith("jobs."):
        tags |= {"mlflow.source.name": module.name, "mlflow.source.type": "JOB"}
    return tags


SQLITE = "sqlite:///"
_NUM_ATTEMPTS = 5


def sqlite_uri(file: str) -> str:
    """Return the URI of a file of SQLite, with the characters escaped that SQLAlchemy would read as something else."""
    return SQLITE + file.replace("%", "%25").replace("?", "%3F")


def sqlite_file(uri: str) -> Path:
    """Return the file that the URI of SQLite names."""
    return Path(unquote(uri.removeprefix(SQLITE).partition("?")[0]))


def open_client(uri: str) -> MlflowClient:
    """Return a client of a server or of a file of SQLite, which is made if it does not exist."""
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
    """Return the ID of the experiment; the artifacts of a new one lie beside the file of SQLite, or at the server."""
    location = (sqlite_file(uri).parent / "mlartifacts").as_uri() if uri.startswith(SQLITE) else None
    if not (existing := client.get_experiment_by_name(name)):
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException:
            if not (existing := client.get_experiment_by_name(name)):  # another process may have made it
                raise
    _refuse_deleted(existing, uri)
    return str(existing.experiment_id)


def check_experiment(uri: str, name: str) -> None:
    """Check that runs can be logged to an experiment, which need not exist; a file of SQLite is not made."""
    if uri.startswith(SQLITE) and not sqlite_file(uri).exists():
        return
    with suppress(MlflowException):  # a store that cannot be opened has its own message
        _refuse_deleted(open_client(uri).get_experiment_by_name(name), uri)


def _refuse_deleted(experiment: Experiment | None, uri: str) -> None:
    """Refuse an experiment that was deleted, but not for ever: nothing can be logged to it."""
    if experiment and experiment.lifecycle_stage == LifecycleStage.DELETED:
        raise ValueError(
            f"tracking.experiment = {experiment.name!r} was deleted in MLflow, which keeps it and its name: bring it back "
            f"by MLFLOW_TRACKING_URI={shlex.quote(masked(uri))} mlflow experiments restore -x {experiment.experiment_id}, "
            "or log to another one by --tracking.experiment NAME"
        )


def log_data_sets(client: MlflowClient, run_id: str, data_sets: Mapping[str, tuple[str, str, str]]) -> None:
    """Log the inputs of a run: context → (name, digest, source URI)."""
    inputs = [
        DatasetInput(
            Dataset(name=name, digest=digest, source_type="uri", source=json.dumps({"uri": masked(source)})),
            [InputTag("mlflow.data.context", context)],
        )
        for context, (name, digest, source) in data_sets.items()
    ]
    for attempt in range(1, _NUM_ATTEMPTS + 1):
        try:
            client.log_inputs(run_id, inputs)
            return
        except MlflowException:  # another process may have made one of the data sets, and the next attempt will find it
            if attempt == _NUM_ATTEMPTS:
                raise
