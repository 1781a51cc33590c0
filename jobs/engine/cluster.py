"""Ray for a job: a local instance that the job starts itself, or the cluster that the job was submitted to."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import ray

from jobs.engine.ray_token import ensure_token

# Set in every process that a job starts, unless the user has set the variable. Silences DeepSpeed's and Transformers'
# logging, keeps the tokenizers' parallelism on after a fork, turns off Ray Data's usage reports, and has the workers'
# health checked twice a second. With Ray Train's default of two seconds, every checkpoint would wait that long for the
# previous one, and the end of a run would be noticed that much later.
_ENVIRONMENT = {
    "DEEPSPEED_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "true",
    "RAY_DATA_USAGE_DISABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}

_NUM_STARTS = 3
_SECONDS_TO_ANSWER = 20.0
_MIN_STARTUP_CONCURRENCY = 6

# Set for workers that compute on CPUs. Ray runs their code in a thread, where glibc returns every freed megabyte to the
# kernel and gets it back as zeroed pages, which costs a small step at least a quarter of its time (benchmarks/README.md).
# A single arena that keeps its memory avoids this. TORCHDYNAMO_DISABLE is set because nothing is compiled here, but DeepSpeed
# imports its Muon optimizer in any case, which would load torch's compiler and delay every start by a second or more.
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
        ConnectionError: if nothing answers at that address for `_SECONDS_TO_ANSWER`.
        TimeoutError: if a local Ray does not start within Ray's own limit of 30 s in any of `_NUM_STARTS` attempts.
    """
    if ray.is_initialized():
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ.get("RAY_ADDRESS"):
        _wait_for_head(os.environ["RAY_ADDRESS"])
        ray.init(logging_level=logging.WARNING, log_to_driver=False)
    else:
        _start_local_ray()
    if threading.current_thread() is threading.main_thread():
        # Let `kill` (SIGTERM) end a job as Ctrl-C does; with Ray's handler the job would exit as failed.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def answers(address: str) -> bool:
    """Return whether something listens at an address, HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0):
            return True
    except OSError:
        return False


def _wait_for_head(address: str) -> None:
    """Wait some seconds for a head that is being started; Ray itself would wait for minutes, and say nothing of use."""
    if not re.fullmatch(r"[^/]+:\d+", address):
        return  # such as "auto" and ray://HOST:PORT, which Ray understands
    deadline = time.monotonic() + _SECONDS_TO_ANSWER
    while not answers(address):
        if time.monotonic() > deadline:
            raise ConnectionError(
                f"RAY_ADDRESS = {address}, but no head of a Ray cluster answers there: start the cluster, or correct the "
                "address; without RAY_ADDRESS the job starts a Ray of its own"
            )
        time.sleep(0.5)


def _start_local_ray() -> None:
    # Do not log at every start that only holders of this user's token may run code: that is intended.
    logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(
        lambda record: "authentication is enabled" not in record.getMessage()
    )
    # Do not start the process that watches for a cloud provider preempting the node: a local machine is not preempted.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    # With Ray's default niceness of 15, training would get almost no CPU time beside other work on this machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Measure the processes only once a minute: there is no dashboard that would show the figures.
    os.environ.setdefault("REPORTER_UPDATE_INTERVAL_MS", "60000")
    # Ray ends an idle worker process after a second if no CPU is free, which is always the case while a run trains.
    # Every block of data would then start a new process, each at the cost of seconds of computing.
    os.environ.setdefault("RAY_num_workers_soft_limit", str(os.cpu_count()))
    # A run needs a dozen processes that compute nothing. Ray warns if there are three times as many processes as it may
    # start concurrently, so raise that number.
    os.environ.setdefault(
        "RAY_worker_maximum_startup_concurrency", str(max(_MIN_STARTUP_CONCURRENCY, os.cpu_count() or 1))
    )
    listen_on_loopback()
    ensure_token()
    others = set(psutil.Process().children())
    for attempt in range(1, _NUM_STARTS + 1):
        # Without address="local" Ray would join whichever cluster was last started on this machine, even a dead one.
        try:
            ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
            _keep_private()
            return
        except Exception as error:  # Ray raises no more specific exception
            if "timed out" not in str(error).lower():
                raise
            for process in set(psutil.Process().children()) - others:  # processes of the failed attempt
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if attempt == _NUM_STARTS:
                raise TimeoutError(
                    f"Ray did not start within 30 s, {_NUM_STARTS} times: the machine is too busy; try again when it is "
                    "less so"
                ) from error


def listen_on_loopback() -> None:
    """Have Ray listen on loopback, of IPv6 too, unless RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1 asks for all addresses.

    Ray does so where it starts no clusters, by default on Windows and macOS, and an address given to `ray.init` does not
    change it. The processes that it starts read the variable; this one has read it already, when it imported Ray.
    """
    name = ray._private.ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    os.environ.setdefault(name, "0")
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = ray._private.ray_constants.env_bool(name, False)


def check_placement(field: str, resources: Mapping[str, float]) -> None:
    """Check that some node of the cluster has the custom resources of a task, which would wait for ever otherwise.

    Args:
        field: name of the setting that the resources come from, for the error message.
        resources: the resources of the task by name.

    Raises:
        ValueError: if no node has them; the message shows what is needed and what the nodes have.
    """
    if not resources:
        return
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0.0) >= amount for name, amount in resources.items()) for node in nodes):
        needed = ", ".join(f"{name}={amount:g}" for name, amount in resources.items())
        largest = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in resources}
        raise ValueError(
            f"{field} = {needed}, but no node of the cluster has as much (largest: "
            f"{', '.join(f'{name}={amount:g}' for name, amount in largest.items())}): start the nodes that are to read "
            f"with ray start --resources, or choose other resources"
        )


def _keep_private() -> None:
    """Close this Ray's session directory, which holds logs and sockets, to others."""
    if (node := ray._private.worker._global_node) is not None:
        Path(node.get_session_dir_path()).chmod(0o700)


def check_resources(
    *, num_workers: int, cpus_per_worker: float, use_gpu: bool, data_cpus: float, gpus_per_worker: int = 1
) -> None:
    """Check that the cluster is large enough for the run.

    Raises:
        ValueError: if the cluster can never schedule the run; the message shows what is needed and what exists.
    """
    total = ray.cluster_resources()
    needed = num_workers * cpus_per_worker + data_cpus
    if needed > total.get("CPU", 0):
        raise ValueError(
            f"workers.num_workers × workers.cpus_per_worker + data = {num_workers} × {cpus_per_worker:g} + "
            f"{data_cpus:g} = {needed:g} CPUs, but the cluster has {total.get('CPU', 0):g}: "
            "use fewer workers or fewer CPUs a worker"
        )
    if use_gpu and (gpus := num_workers * gpus_per_worker) > total.get("GPU", 0):
        raise ValueError(
            f"workers.use_gpu = True needs {gpus} GPUs, {gpus_per_worker} a worker, but the cluster has "
            f"{total.get('GPU', 0):g}"
        )
