"""Metrics of an MLflow run: sending them from a background thread, which keeps what could not be sent, and reading them.

MLflow is imported only when it is called: the import takes seconds, and a worker makes its first steps without it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jobs.engine.masking import masked

# By default MLflow retries seven times, which takes four minutes, for everything that is sent to an unreachable server.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
# By default MLflow prints the address of every run that ends, including a password in it.
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"

logger = logging.getLogger(__name__)

_MAX_METRICS_PER_CALL = 1000
_SECONDS_BETWEEN_SAMPLES = 10.0  # of the system metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """An open MLflow run, as plain data that can be sent to the workers."""

    uri: str = field(repr=False)
    """MLflow tracking URI, including its password if it has one."""
    run_id: str
    """MLflow's ID of the run."""
    experiment_id: str = ""
    """MLflow's ID of the experiment; empty if the run was not opened here."""


def metric_name(key: str) -> str:
    """Return a metric name that MLflow accepts, which does not allow @."""
    return key.replace("@", "_at_")


@contextmanager
def survive_outage(what: str) -> Iterator[None]:
    """Turn any exception inside the block into a warning, so that an MLflow failure does not lose a trained model."""
    try:
        yield
    except Exception as error:
        logger.warning("%s could not be recorded in MLflow: %s", what, masked(str(error)))


class MetricLogger:
    """Sends metrics to one run from a background thread; never raises and never blocks training."""

    def __init__(self, run: TrackedRun, *, warn: Callable[[str], None], seconds_between_sends: float = 2.0) -> None:
        self._tracked = run
        self._warn = warn
        self._seconds = seconds_between_sends
        self._lock = threading.Lock()
        self._waiting: list[list[Any]] = []  # key, value, milliseconds, step
        self._stop = threading.Event()
        self._deadline = math.inf  # for the last attempts to send, set by close()
        self._thread = threading.Thread(target=self._run, name="mlflow-metrics", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the finite values of a step; undefined ones (such as a quantile of an empty set) are dropped."""
        now = int(time.time() * 1000)
        self.resend(
            [metric_name(key), float(value), now, step] for key, value in metrics.items() if math.isfinite(value)
        )

    def unsent(self) -> list[list[Any]]:
        """Return the values that have not been sent, as plain data for a checkpoint."""
        with self._lock:
            return [*self._waiting]

    def resend(self, metrics: Iterable[Sequence[Any]]) -> None:
        """Queue values that :meth:`unsent` returned; sending a value twice is harmless."""
        with self._lock:
            self._waiting += map(list, metrics)

    def close(self, *, seconds: float = 30.0) -> int:
        """Send the remaining values within the given time; returns the number of values that could not be sent."""
        self._deadline = time.monotonic() + seconds
        self._stop.set()
        # Only the thread sends values: a server that hangs would block the sender, and two senders of the same values
        # would both remove them from the queue.
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
        """Send all queued values, oldest first; returns False on a failure, after which unsent values stay in the queue."""
        while batch := self.unsent()[:_MAX_METRICS_PER_CALL]:
            try:
                send_metrics(self._tracked, batch)
            except Exception as error:  # training must go on, whatever the error
                self._warn(f"MLflow is unreachable, {len(self._waiting)} values wait: {masked(str(error))}")
                return False
            with self._lock:
                self._waiting = self._waiting[len(batch) :]
        return True


def send_metrics(run: TrackedRun, metrics: Sequence[Sequence[Any]]) -> None:
    """Send values that :meth:`MetricLogger.unsent` returned; sending a value twice is harmless."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient(run.uri)
    for first in range(0, len(metrics), _MAX_METRICS_PER_CALL):
        part = [Metric(*metric) for metric in metrics[first : first + _MAX_METRICS_PER_CALL]]
        client.log_batch(run.run_id, metrics=part, synchronous=True)


def metric_history(run: TrackedRun, key: str) -> dict[int, float]:
    """Return step → value of a metric; if a restart logged a step again, the latest value counts."""
    from mlflow import MlflowClient

    history = MlflowClient(run.uri).get_metric_history(run.run_id, metric_name(key))
    return {metric.step: metric.value for metric in sorted(history, key=lambda metric: metric.timestamp)}


class SystemMetrics:
    """Logs usage of CPU, memory, disk, network and GPUs in the background, and once more on closing."""

    def __init__(self, logger: MetricLogger, step: Callable[[], int]) -> None:
        self._logger, self._step = logger, step
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        from mlflow.system_metrics import system_metrics_monitor

        system_metrics_monitor._logger.setLevel(logging.WARNING)  # it tells that a machine has no GPU
        run = self._logger._tracked
        # It is never started: it would stop for good at its first failed call, and count samples in the place of steps.
        collector = system_metrics_monitor.SystemMetricsMonitor(run.run_id, tracking_uri=run.uri)
        is_last = False
        collector.collect_metrics()  # CPU load is measured since the thread's previous call; the first gives 0
        while not is_last:
            for monitor in collector.monitors:
                monitor.clear_metrics()
            is_last = self._stop.wait(_SECONDS_BETWEEN_SAMPLES)
            collector.collect_metrics()
            figures = collector.aggregate_metrics()
            self._logger.log({f"system/{name}": value for name, value in figures.items()}, self._step())
