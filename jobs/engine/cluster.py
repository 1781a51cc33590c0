"""Ray for a job: a local one that the job starts itself, or the cluster that it was submitted to."""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import suppress

import psutil
import ray

# Set in every process that a job starts, unless the person has set it: DeepSpeed's and Transformers' chatter off, no
# thread pools inside forks, no process that tells Ray's makers what Ray Data ran, and a look at the workers twice a
# second. Ray Train's own two seconds are what every checkpoint waits for the one before it, and every end for being seen.
_ENVIRONMENT = {
    "DEEPSPEED_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "true",
    "RAY_DATA_USAGE_DISABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}

_NUM_STARTS = 3
_MIN_STARTUP_CONCURRENCY = 6

# For workers that compute on CPUs. Ray runs their code in a thread, where glibc gives every freed megabyte back to the
# kernel and takes it again as zeroed pages: a quarter of a small step (docs/log.md). One arena that keeps its memory
# avoids that. Nothing is compiled here; DeepSpeed's Muon, which it imports for every optimizer, would load torch's
# compiler, a second or more of every start.
CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}


def start_ray() -> None:
    """Connect to $RAY_ADDRESS (set by `ray job submit`), or start Ray on this machine.

    Raises:
        TimeoutError: if it does not come up in the 30 s that Ray gives itself, however often it is tried.
    """
    if ray.is_initialized():
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=logging.WARNING, log_to_driver=False)
    else:
        _start_local_ray()
    if threading.current_thread() is threading.main_thread():
        # `kill` ends a job as Ctrl-C does. Ray would have it exit as one that failed.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _start_local_ray() -> None:
    # Only who has this user's token may have it run code: as it should be, and nothing to warn of at every start.
    logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(
        lambda record: "authentication is enabled" not in record.getMessage()
    )
    # A process of every run that waits for a cloud to take a node away: this machine is no such node.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    # Ray starts workers at niceness 15: beside other work on this machine, training would get next to no processor time.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Nor is there a dashboard to measure every process for.
    os.environ.setdefault("REPORTER_UPDATE_INTERVAL_MS", "60000")
    # A process without a task is ended after a second where no CPU is free, and while a run trains none is: every block
    # that it reads would start another one, seconds of computing each.
    os.environ.setdefault("RAY_num_workers_soft_limit", str(os.cpu_count()))
    # A run needs a dozen processes that compute nothing; Ray warns of three times as many as it may start at a time.
    os.environ.setdefault(
        "RAY_worker_maximum_startup_concurrency", str(max(_MIN_STARTUP_CONCURRENCY, os.cpu_count() or 1))
    )
    others = set(psutil.Process().children())
    for attempt in range(1, _NUM_STARTS + 1):
        # "local": without it Ray would join whatever cluster was last started on this machine, dead ones included.
        try:
            ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
            return
        except Exception as error:  # Ray raises nothing narrower
            if "timed out" not in str(error).lower():
                raise
            for process in set(psutil.Process().children()) - others:  # what it leaves behind
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if attempt == _NUM_STARTS:
                raise TimeoutError(
                    f"Ray did not start within 30 s, {_NUM_STARTS} times: the machine is too busy; try again when it is "
                    "less so"
                ) from error


def check_resources(*, num_workers: int, cpus_per_worker: float, use_gpu: bool, data_cpus: float) -> None:
    """Refuse what the cluster can never schedule, with the arithmetic.

    Raises:
        ValueError: naming what is needed and what there is.
    """
    total = ray.cluster_resources()
    needed = num_workers * cpus_per_worker + data_cpus
    if needed > total.get("CPU", 0):
        raise ValueError(
            f"workers.num_workers × workers.cpus_per_worker + data = {num_workers} × {cpus_per_worker:g} + "
            f"{data_cpus:g} = {needed:g} CPUs, but the cluster has {total.get('CPU', 0):g}: "
            "use fewer workers or fewer CPUs a worker"
        )
    if use_gpu and num_workers > total.get("GPU", 0):
        raise ValueError(
            f"workers.use_gpu = True needs {num_workers} GPUs, one a worker, but the cluster has {total.get('GPU', 0):g}"
        )
