"""Logs usage of CPU, memory, disk, network and GPUs on the first worker's node, under MLflow's names for these metrics.

MLflow's own monitors take the measurements, and the run's metric logger sends them. MLflow's thread, which would do
both, is not used because it stops for good at the first failed call and opens a second connection to the server.
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

from jobs.engine.metrics import MetricLogger


class SystemMetrics:
    """Takes samples in the background until it is closed, and one more on closing, so that a short run has figures too.

    Args:
        logger: sends the samples to MLflow.
        step: returns the current optimizer step, under which a sample is logged.
        seconds_between_samples: seconds between samples, which is the time span that each value in MLflow covers.
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
