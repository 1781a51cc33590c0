"""The machine under a run: CPU, memory, disk, network and GPUs of the first worker's node, as MLflow names them.

MLflow's own monitors do the reading, and the run's metric logger does the sending: the thread that MLflow would do both in
ends for good at the first call that fails, and opens a second way to the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

from jobs.engine.tracking import MetricLogger


class SystemMetrics:
    """Samples in the background until it is closed, and once more then, so that a short run has figures too.

    Args:
        logger: takes the samples.
        step: the optimizer step that a sample belongs to.
        seconds_between_samples: the figures of MLflow's charts stand for as much time.
    """

    def __init__(self, logger: MetricLogger, step: Callable[[], int], *, seconds_between_samples: float = 10.0) -> None:
        self._logger, self._step, self._seconds = logger, step, seconds_between_samples
        self._monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor(), *_gpu_monitors()]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the last sample."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for monitor in self._monitors:  # CPU load is counted from a thread's last look; its first says 0
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
    """Of the makers whose GPUs are here; they need `nvidia-ml-py` or `pyrsmi`, and say by an error that they cannot read."""
    found: list[BaseMetricsMonitor] = []
    for monitor in (GPUMonitor, ROCMMonitor):
        try:
            found.append(monitor())
        except (ImportError, RuntimeError):
            continue
    return found
