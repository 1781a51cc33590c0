"""MLflow: one run for one logical training run, however often it restarts; an outage never stops training.

The driver opens (or finds) the run; rank 0 logs into it from a background thread, which keeps what could not be sent and
tries again. `MlflowClient` is used directly: the fluent API would open a new run on every restart.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import math
import os
import shlex
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from jobs.engine.config import TrackingSection
from jobs.engine.identity import configuration_hash
from jobs.engine.masking import masked
from jobs.engine.revision import revision_tags

logger = logging.getLogger(__name__)

_MAX_METRICS_PER_CALL = 1000
_SECONDS_TO_ANSWER = 10
# MLflow would ask a server that is gone seven times, which takes four minutes, for everything that is sent at the end.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
# MLflow would print the address of every run that ends, with the password that may be in it.
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
_DATABASES = ("postgresql", "mysql", "mssql")
_RUN_TAG = "tempnet.run_directory"
_JOB_TAG = "ray_job_id"
# What Ray tells the driver of a submitted job about it, in JSON.
_SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """An open MLflow run, as plain data that travels to the workers."""

    uri: str = field(repr=False)
    """With its password, if it has one."""
    run_id: str


def default_uri(storage: str) -> str:
    """$MLFLOW_TRACKING_URI, or a database beside the runs (only where the storage is a local path)."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    if "://" in storage:
        raise ValueError(
            f"tracking.uri is not given, and run.storage = {storage!r} is no local directory to keep a database in: "
            "give the URI of an MLflow server, or --tracking.no-enabled"
        )
    return f"sqlite:///{storage}/mlflow.db"


def resolved_uri(tracking: TrackingSection, storage: str) -> str:
    """Where to log; empty: nowhere.

    Raises:
        ValueError: if it is not said and cannot be guessed.
        ConnectionError: if a server does not answer, unless `tracking.optional`.
    """
    if not tracking.enabled:
        return ""
    uri = tracking.uri or default_uri(storage)
    shown = masked(uri)
    if any(map(str.isspace, uri)):
        raise ValueError("tracking.uri holds white space: write a space as %20")
    if not uri.startswith(("http://", "https://")):
        if not uri.startswith(("sqlite:///", "file:", "databricks", *_DATABASES)):
            raise ValueError(
                f"tracking.uri = {shown!r} is no address of MLflow: give http://HOST:PORT of a server, or sqlite:///PATH"
            )
        return uri
    try:
        parts = urllib.parse.urlsplit(f"{uri.rstrip('/')}/health")
        # Whether a server lives is told without a password, which urllib would take for a part of the host's name.
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        with urllib.request.urlopen(address, timeout=_SECONDS_TO_ANSWER):
            return uri
    except urllib.error.HTTPError:
        return uri  # it answers; whether it lets us in is said when the run is opened
    except OSError as error:
        if tracking.optional:
            logger.warning("MLflow at %s does not answer: nothing is logged", shown)
            return ""
        raise ConnectionError(
            f"MLflow at tracking.uri = {shown!r} does not answer: start it, give another one, or go on without it by "
            f"--tracking.optional or --tracking.no-enabled. {masked(str(error))}"
        ) from error


def reconnection_uri(recorded: str, tracking: TrackingSection) -> str:
    """Where a run was logged: what is recorded of it, with the login that only the command line or the environment has."""
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
    """Find the MLflow run that belongs to a run directory, or create it with its parameters, tags and inputs. A run that is
    found keeps all these; a Ray job that continues it is named beside those before.

    Args:
        tags: beside :func:`origin_tags` of this process, or in their place.
        data_sets: context → (name, digest, source URI).

    Raises:
        ConnectionError: if MLflow refuses.
    """
    tags = {**origin_tags(), **tags}
    with _naming_refusals(uri, name):
        if uri.startswith("sqlite:///"):
            Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(uri)
        found = client.get_experiment_by_name(experiment)
        if found is None:
            location = None
            if uri.startswith("sqlite:///"):
                location = (Path(uri.removeprefix("sqlite:///")).parent / "mlartifacts").as_uri()
            experiment_id = client.create_experiment(experiment, artifact_location=location)
        else:
            experiment_id = found.experiment_id
        quote = '"' if "'" in directory else "'"  # MLflow knows no escapes
        same = f"tags.`{_RUN_TAG}` = {quote}{directory}{quote}"
        existing = client.search_runs([experiment_id], filter_string=same, max_results=1)
        if existing:
            (run,) = existing
            client.set_terminated(run.info.run_id, status="RUNNING")
            known, job = run.data.tags.get(_JOB_TAG, ""), tags.get(_JOB_TAG, "")
            if job and job not in known.split(", "):
                client.set_tag(run.info.run_id, _JOB_TAG, f"{known}, {job}" if known else job)
            return TrackedRun(uri=uri, run_id=run.info.run_id)
        run = client.create_run(experiment_id, run_name=name, tags={_RUN_TAG: directory, **tags})
        run_id = run.info.run_id
        client.log_batch(run_id, params=[Param(key, masked(str(value))[:6000]) for key, value in parameters.items()])
        inputs = [
            DatasetInput(
                dataset=Dataset(
                    name=data_name, digest=digest, source_type="uri", source=json.dumps({"uri": masked(source)})
                ),
                tags=[InputTag("mlflow.data.context", context)],
            )
            for context, (data_name, digest, source) in data_sets.items()
        ]
        client.log_inputs(run_id, inputs)
        return TrackedRun(uri=uri, run_id=run_id)


@contextmanager
def _naming_refusals(uri: str, name: str) -> Iterator[None]:
    """What MLflow raises as an error without a login, which its own text may hold as part of the address."""
    try:
        yield
    except MlflowException as error:
        raise ConnectionError(f"MLflow at {masked(uri)} refuses the run {name!r}: {masked(str(error))}") from None


def where_to_browse(uri: str) -> str:
    """What a person opens, or types, to look at the runs; a password is left to them."""
    uri = masked(uri)
    if uri.startswith(("http://", "https://")):
        return uri
    return f".venv/bin/mlflow server --host 127.0.0.1 --port 5000 --backend-store-uri {shlex.quote(uri)}"


def run_tags(config: Any, tracking: TrackingSection) -> dict[str, str]:
    """What a run is found by: its configuration, its preset and the place of that in a paper; none is empty.

    Args:
        config: the dataclass that everything follows from.
    """
    tags = {
        "configuration_hash": configuration_hash(config),
        "preset": tracking.preset,
        "paper.table": tracking.paper,
    }
    return {name: value for name, value in tags.items() if value}


def ray_job_id() -> str:
    """What `ray job submit` calls the job that this process is the driver of, else Ray's number of it; empty without Ray."""
    submitted = json.loads(os.environ.get(_SUBMITTED_JOB, "{}")).get("metadata", {})
    if name := submitted.get("job_submission_id", ""):
        return str(name)
    return str(ray.get_runtime_context().get_job_id()) if ray.is_initialized() else ""


def origin_tags() -> dict[str, str]:
    """Who started it, by which job, from which code: what is known of these in the process that the job was started by."""
    tags = revision_tags()
    if ray_job := ray_job_id():
        tags[_JOB_TAG] = ray_job
    with contextlib.suppress(OSError, KeyError):  # a container may run as nobody
        tags["mlflow.user"] = getpass.getuser()
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None and module.name.startswith("jobs."):
        tags |= {"mlflow.source.name": module.name, "mlflow.source.type": "JOB"}
    return tags


class MetricLogger:
    """Sends metrics to one run from a background thread; never raises and never blocks training."""

    def __init__(self, run: TrackedRun, *, warn: Callable[[str], None], seconds_between_sends: float = 2.0) -> None:
        self._client = MlflowClient(run.uri)
        self._run_id = run.run_id
        self._warn = warn
        self._seconds = seconds_between_sends
        self._lock = threading.Lock()
        self._waiting: list[Metric] = []
        self._stop = threading.Event()
        self._deadline = math.inf  # of the last attempts, once it is told to stop
        self._thread = threading.Thread(target=self._run, name="mlflow-metrics", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the finite values of a step; what is undefined (a quantile of nothing) has no place in a chart."""
        now = int(time.time() * 1000)
        with self._lock:
            self._waiting += [
                Metric(metric_name(key), float(value), now, step)
                for key, value in metrics.items()
                if math.isfinite(value)
            ]

    def unsent(self) -> list[list[Any]]:
        """What has not been sent, as plain values for a checkpoint."""
        with self._lock:
            return [[metric.key, metric.value, metric.timestamp, metric.step] for metric in self._waiting]

    def resend(self, metrics: Iterable[Sequence[Any]]) -> None:
        """Queue what :meth:`unsent` gave; sending a value twice does no harm."""
        with self._lock:
            self._waiting += [Metric(*metric) for metric in metrics]

    def close(self, *, seconds: float = 30.0) -> int:
        """Send what is left, trying for at most this long; returns the number of values that could not be sent."""
        self._deadline = time.monotonic() + seconds
        self._stop.set()
        # The thread alone sends: a server that hangs would hold whoever does, and two who sent the same values would both
        # take them off the queue.
        self._thread.join(timeout=seconds)
        if self._waiting:
            self._warn(f"{len(self._waiting)} metric values could not be sent to MLflow")
        return len(self._waiting)

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self._send()
        while self._waiting and not self._send() and time.monotonic() < self._deadline:
            time.sleep(min(self._seconds, 1.0))

    def _send(self) -> bool:
        """Send all that waits, oldest first; what fails stays in the queue."""
        with self._lock:
            batch = self._waiting[:_MAX_METRICS_PER_CALL]
        while batch:
            try:
                self._client.log_batch(self._run_id, metrics=batch, synchronous=True)
            except Exception as error:  # whatever the outage is, training goes on
                self._warn(f"MLflow is unreachable, {len(self._waiting)} values wait: {masked(str(error))}")
                return False
            with self._lock:
                self._waiting = self._waiting[len(batch) :]
                batch = self._waiting[:_MAX_METRICS_PER_CALL]
        return True


def metric_name(key: str) -> str:
    """A name that MLflow takes: it knows no @."""
    return key.replace("@", "_at_")


def metric_history(run: TrackedRun, key: str) -> dict[int, float]:
    """Step → value of a metric; where a restart logged a step again, the last value counts."""
    history = MlflowClient(run.uri).get_metric_history(run.run_id, metric_name(key))
    return {metric.step: metric.value for metric in sorted(history, key=lambda metric: metric.timestamp)}


@contextlib.contextmanager
def survive_outage(what: str) -> Iterator[None]:
    """Turn any failure of MLflow inside the block into a warning: a trained model is worth more than its log."""
    try:
        yield
    except Exception as error:
        logger.warning("%s could not be recorded in MLflow: %s", what, masked(str(error)))


@contextlib.contextmanager
def mark_if_ended(run: TrackedRun | None) -> Iterator[None]:
    """A run that an error or Ctrl-C ends inside the block is FAILED or KILLED in MLflow, and so is every run under it that
    was still going on."""
    try:
        yield
    except BaseException as error:
        if run is not None:
            with survive_outage("the end of the run"):
                _end(run, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise


def _end(run: TrackedRun, status: str) -> None:
    end_children(run, status)
    MlflowClient(run.uri).set_terminated(run.run_id, status=status)


def end_children(run: TrackedRun, status: str) -> None:
    """End every run under this one that is still going on."""
    client = MlflowClient(run.uri)
    under = f"tags.`mlflow.parentRunId` = '{run.run_id}' and attributes.status = 'RUNNING'"
    for child in client.search_runs([client.get_run(run.run_id).info.experiment_id], filter_string=under):
        client.set_terminated(child.info.run_id, status=status)


def send_metrics(run: TrackedRun, metrics: Sequence[Sequence[Any]]) -> None:
    """Send what :meth:`MetricLogger.unsent` gave; sending a value twice does no harm."""
    client = MlflowClient(run.uri)
    for first in range(0, len(metrics), _MAX_METRICS_PER_CALL):
        client.log_batch(
            run.run_id, metrics=[Metric(*metric) for metric in metrics[first : first + _MAX_METRICS_PER_CALL]]
        )


def finish_run(
    run: TrackedRun,
    *,
    status: str,
    artifacts: Path | str | None,
    metrics: Mapping[str, float],
    tags: Mapping[str, str] | None = None,
    note: str = "",
) -> None:
    """Close the run: final metrics, a directory of artifacts, and its status (FINISHED or FAILED).

    Args:
        note: Markdown that MLflow shows above everything else of the run.
    """
    client = MlflowClient(run.uri)
    now = int(time.time() * 1000)
    client.log_batch(
        run.run_id,
        metrics=[
            Metric(metric_name(key), float(value), now, 0) for key, value in metrics.items() if math.isfinite(value)
        ],
        tags=[
            RunTag(key, value)
            for key, value in {**(tags or {}), **({"mlflow.note.content": note} if note else {})}.items()
        ],
    )
    if artifacts is not None:
        client.log_artifacts(run.run_id, str(artifacts))
    client.set_terminated(run.run_id, status=status)
