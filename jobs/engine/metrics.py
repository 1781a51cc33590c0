"""Metrics of an MLflow run: sending them from a background thread, which keeps what could not be sent, and reading them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

from jobs.engine.masking import masked
from jobs.engine.tracking import TrackedRun, metric_name

_MAX_METRICS_PER_CALL = 1000


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
        self._deadline = math.inf  # for the last attempts to send, set by close()
        self._thread = threading.Thread(target=self._run, name="mlflow-metrics", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the finite values of a step; undefined ones (such as a quantile of an empty set) are dropped."""
        now = int(time.time() * 1000)
        with self._lock:
            self._waiting += [
                Metric(metric_name(key), float(value), now, step)
                for key, value in metrics.items()
                if math.isfinite(value)
            ]

    def unsent(self) -> list[list[Any]]:
        """Return the values that have not been sent, as plain data for a checkpoint."""
        with self._lock:
            return [[metric.key, metric.value, metric.timestamp, metric.step] for metric in self._waiting]

    def resend(self, metrics: Iterable[Sequence[Any]]) -> None:
        """Queue values that :meth:`unsent` returned; sending a value twice is harmless."""
        with self._lock:
            self._waiting += [Metric(*metric) for metric in metrics]

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
        with self._lock:
            batch = self._waiting[:_MAX_METRICS_PER_CALL]
        while batch:
            try:
                self._client.log_batch(self._run_id, metrics=batch, synchronous=True)
            except Exception as error:  # training must go on, whatever the error
                self._warn(f"MLflow is unreachable, {len(self._waiting)} values wait: {masked(str(error))}")
                return False
            with self._lock:
                self._waiting = self._waiting[len(batch) :]
                batch = self._waiting[:_MAX_METRICS_PER_CALL]
        return True


def send_metrics(run: TrackedRun, metrics: Sequence[Sequence[Any]]) -> None:
    """Send values that :meth:`MetricLogger.unsent` returned; sending a value twice is harmless."""
    client = MlflowClient(run.uri)
    for first in range(0, len(metrics), _MAX_METRICS_PER_CALL):
        client.log_batch(
            run.run_id, metrics=[Metric(*metric) for metric in metrics[first : first + _MAX_METRICS_PER_CALL]]
        )


def metric_history(run: TrackedRun, key: str) -> dict[int, float]:
    """Return step → value of a metric; if a restart logged a step again, the latest value counts."""
    history = MlflowClient(run.uri).get_metric_history(run.run_id, metric_name(key))
    return {metric.step: metric.value for metric in sorted(history, key=lambda metric: metric.timestamp)}


class SystemMetrics:
    """Logs usage of CPU, memory, disk, network and GPUs in the background, and once more on closing.

    MLflow's own thread stops for good at the first failed call, and opens a second connection to the server.
    """

    def __init__(self, logger: MetricLogger, step: Callable[[], int], *, seconds_between_samples: float = 10.0) -> None:
        self._logger, self._step, self._seconds = logger, step, seconds_between_samples
        self._monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor(), *_gpu_monitors()]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the last sample and stop."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for monitor in self._monitors:  # CPU load is measured since the thread's previous call; the first gives 0
            monitor.collect_metrics()
            monitor.clear_metrics()
        while not self._stop.wait(self._seconds):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        for monitor in self._monitors:
            monitor.collect_metrics()
            figures = monitor.aggregate_metrics()
            monitor.clear_metrics()
            self._logger.log({f"system/{name}": value for name, value in figures.items()}, self._step())


def _gpu_monitors() -> list[BaseMetricsMonitor]:
    """Return the monitors of the GPUs on this machine.

    They need `nvidia-ml-py` or `pyrsmi`, and raise an error on creation if they cannot read any GPU.
    """
    found: list[BaseMetricsMonitor] = []
    for monitor in (GPUMonitor, ROCMMonitor):
        try:
            found.append(monitor())
        except (ImportError, RuntimeError):
            continue
    return found
