"""Ray for a job: a local instance that the job starts itself, or the cluster that the job was submitted to."""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import ray

from jobs.engine.config import TrainingConfig
from jobs.engine.ray_private import (
    address_that_ray_asks,
    end_with_this_process,
    find_started_cluster,
    in_a_group_of_their_own,
    listen_on_loopback,
)

# Set in every process that a job starts, unless the user has set the variable. With Ray Train's default interval of two
# seconds, every checkpoint would wait that long for the previous one, and the end of a run would be noticed that much later.
_ENVIRONMENT = {
    "DEEPSPEED_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "true",
    "RAY_DATA_USAGE_DISABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}
# The same for a Ray of the job's own on this machine.
_LOCAL_ENVIRONMENT = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a local machine is not preempted
    "RAY_worker_niceness": "0",  # with 15, Ray's default, training gets almost no CPU time beside other work
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # how often processes are measured; no dashboard shows it
    # A node whose agent has not started within half a minute ends, and with it the job; a busy machine takes longer.
    "RAY_agent_register_timeout_ms": "300000",
    # Ray ends an idle process after a second if no CPU is free, so that every block of data would start a new one.
    "RAY_num_workers_soft_limit": str(os.cpu_count()),
    # Ray warns if there are three times as many processes, and a run needs a dozen that compute nothing.
    "RAY_worker_maximum_startup_concurrency": str(max(6, os.cpu_count() or 1)),
}

_NUM_STARTS = 3
_SECONDS_TO_ANSWER = 20.0
_MAX_WAIT_MINUTES = 60.0
_SECONDS_BETWEEN_LOOKS = 5.0
# Ray's sockets lie in DIRECTORY/ray/session_DATE_TIME_MICROSECONDS_PID/sockets; the path of a socket has at most 107 bytes.
_MAX_DIRECTORY_BYTES = 107 - len("/ray/session_2026-01-31_23-59-59_123456_4194304/sockets/plasma_store")


def start_ray() -> None:
    """Connect to $RAY_ADDRESS (set by `ray job submit`), or start Ray on this machine."""
    if ray.is_initialized():
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if address := check_machine():
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    else:
        _start_local_ray()
    if threading.current_thread() is threading.main_thread():
        # Let `kill` (SIGTERM) end a job as Ctrl-C does; with Ray's handler the job would exit as failed.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def starts_own_ray() -> bool:
    """Return whether a job starts a Ray on this machine, as $RAY_ADDRESS names no cluster."""
    return os.environ.get("RAY_ADDRESS", "") in ("", "local")


def check_machine() -> str:
    """Check that a job can start a Ray of its own here, or that the cluster of $RAY_ADDRESS answers; return its address."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address == "auto":
        # Ray would join any Ray of this machine, such as one that another job has started for itself and will end.
        address = find_started_cluster()
        if not address:
            raise ConnectionError(
                "RAY_ADDRESS = auto, but no cluster was started by `ray start` on this machine: start one, give its "
                "HOST:PORT, or unset RAY_ADDRESS for a Ray of the job's own"
            )
    if address in ("", "local"):
        private_directory()
        return ""
    _wait_for_head(address)
    return address


def private_directory() -> Path:
    """Return the directory that nobody else can enter for what Ray writes, which opens its own ones to all users."""
    places = [os.environ.get("RAY_TMPDIR", ""), tempfile.gettempdir(), "/tmp"]
    for place in filter(None, places):
        directory = Path(place) / f"ray-{os.getuid()}"
        if len(os.fsencode(directory)) > _MAX_DIRECTORY_BYTES:
            continue
        with suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = directory.lstat()
            if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid():
                directory.chmod(0o700)
                return directory
    raise OSError(
        f"Ray needs a directory of this user's own of at most {_MAX_DIRECTORY_BYTES} bytes, and neither TMPDIR = "
        f"{tempfile.gettempdir()} nor /tmp has room for one named ray-{os.getuid()}: set RAY_TMPDIR to a short path"
    )


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
    place = address.removeprefix("ray://")
    if not re.fullmatch(r"[^/]+:\d+", place):
        raise ConnectionError(f"RAY_ADDRESS = {address} is no HOST:PORT of a Ray cluster, and neither auto nor local")
    if place == address:
        # Ray takes the address of this machine for that of loopback, where a head may not listen.
        place = address_that_ray_asks(address)
    deadline = time.monotonic() + _SECONDS_TO_ANSWER
    while not answers(place):
        if time.monotonic() > deadline:
            asked = "" if place == address else f" (Ray asks at {place})"
            raise ConnectionError(
                f"RAY_ADDRESS = {address}, but no head of a Ray cluster answers there{asked}: start the cluster, or correct "
                "the address; without RAY_ADDRESS the job starts a Ray of its own"
            )
        time.sleep(0.5)
    if os.environ.get("RAY_USE_TLS", "0") == "1":
        return
    with grpc.insecure_channel(place, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=max(1.0, deadline - time.monotonic()))
        except grpc.FutureTimeoutError:
            raise ConnectionError(
                f"RAY_ADDRESS = {address}: what listens there is no head of a Ray cluster; correct the address, or unset "
                "RAY_ADDRESS for a Ray of the job's own"
            ) from None


def _start_local_ray() -> None:
    # It would log at every start that only holders of this user's token may run code.
    logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(
        lambda record: "authentication is enabled" not in record.getMessage()
    )
    for name, value in _LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    listen_on_loopback()
    ensure_token()
    others = set(psutil.Process().children())
    for attempt in range(1, _NUM_STARTS + 1):
        # Without address="local" Ray would join whichever cluster was last started on this machine, even a dead one.
        try:
            with in_a_group_of_their_own():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    logging_level=logging.WARNING,
                    log_to_driver=False,
                    _temp_dir=str(private_directory() / "ray"),  # Ray opens this directory to all, too
                )
            end_with_this_process()
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


def ensure_token() -> None:
    """Make the user's token for Ray, `~/.ray/auth_token`, unless there is one or none is read, and close it to others.

    Where the home directory cannot be written, it lies in :func:`private_directory`. Ray makes one, too, but of two jobs that
    do so together the later one replaces the token of the other, whose Ray would then let no new process in.
    """
    is_given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if is_given or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    try:
        _make_token(Path.home() / ".ray" / "auth_token")
    except (OSError, RuntimeError):  # the latter: there is no home directory
        path = private_directory() / "auth_token"
        _make_token(path)
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)


def _make_token(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix="auth_token-") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            with suppress(FileExistsError):  # another job was faster: its token is whole, and it counts
                os.link(file.name, path)
    if path.stat().st_uid == os.getuid():
        path.chmod(0o600)


def wait_for_nodes(bundles: list[dict[str, float]], have_come: Callable[[], bool], max_wait_minutes: float) -> None:
    """Ask the autoscaler of $RAY_ADDRESS's cluster, if it has one, for resources until nodes have come or time is up."""
    if starts_own_ray() or have_come():
        return
    from ray.autoscaler.sdk import request_resources

    wanted = ", ".join(f"{name}={sum(bundle.get(name, 0.0) for bundle in bundles):g}" for name in bundles[0])
    text = (
        f"the cluster has too few nodes for {wanted}: asking its autoscaler, for at most {max_wait_minutes:g} minutes"
    )
    print(text, file=sys.stderr, flush=True)
    deadline = time.monotonic() + 60.0 * max_wait_minutes
    try:
        while not have_come() and time.monotonic() < deadline:
            request_resources(bundles=bundles)  # again, because another job's request replaces it
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    finally:
        request_resources(bundles=[])  # so that nodes that nobody uses can go


def check_placement(field: str, resources: dict[str, float], max_wait_minutes: float = _MAX_WAIT_MINUTES) -> None:
    """Check that some node of the cluster has the custom resources of a task, which would wait for ever otherwise."""
    if not resources:
        return

    def nodes() -> list[dict[str, float]]:
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def have_come() -> bool:
        return any(all(node.get(name, 0.0) >= amount for name, amount in resources.items()) for node in nodes())

    def text(amounts: dict[str, float]) -> str:
        return ", ".join(f"{name}={amount:g}" for name, amount in amounts.items())

    wait_for_nodes([resources], have_come, max_wait_minutes)
    if not have_come():
        largest = {name: max((node.get(name, 0.0) for node in nodes()), default=0.0) for name in resources}
        raise ValueError(
            f"{field} = {text(resources)}, but no node of the cluster has as much (largest: {text(largest)}): start the "
            "nodes that are to read with ray start --resources, or choose other resources"
        )


def check_run(config: TrainingConfig, data_cpus: float, total: Mapping[str, float] | None = None) -> None:
    """Check that there is room for the least number of workers of a run; `data_cpus` is for the largest number."""
    workers = config.workers
    check_resources(
        num_workers=workers.min_workers,
        cpus_per_worker=workers.cpus_per_worker,
        use_gpu=workers.use_gpu,
        data_cpus=data_cpus * workers.min_workers / workers.max_workers,
        total=total,
        max_wait_minutes=config.run.max_wait_minutes,
    )


def check_resources(
    *,
    num_workers: int,
    cpus_per_worker: float,
    use_gpu: bool,
    data_cpus: float,
    gpus_per_worker: int = 1,
    total: Mapping[str, float] | None = None,
    num_runs: int = 1,
    max_wait_minutes: float = _MAX_WAIT_MINUTES,
) -> None:
    """Check that the cluster, given time to grow for `num_runs` at a time, is large enough for a run."""
    place = "the cluster has" if total is None else "this machine has"
    needed = num_workers * cpus_per_worker + data_cpus
    gpus = num_workers * gpus_per_worker if use_gpu else 0
    if total is None:

        def have_come() -> bool:
            has = ray.cluster_resources()
            return round(num_runs * needed - has.get("CPU", 0.0), 6) <= 0 and num_runs * gpus <= has.get("GPU", 0.0)

        worker = {"CPU": cpus_per_worker} | ({"GPU": gpus_per_worker} if use_gpu else {})
        num_parts = math.ceil(data_cpus)  # of at most a CPU each, so that they fit on any node
        bundles = [worker] * num_workers + [{"CPU": data_cpus / max(1, num_parts)}] * num_parts
        wait_for_nodes(bundles * num_runs, have_come, max_wait_minutes)
        total = ray.cluster_resources()
    if needed > total.get("CPU", 0):
        raise ValueError(
            f"workers.num_workers × workers.cpus_per_worker + data = {num_workers} × {cpus_per_worker:g} + "
            f"{data_cpus:g} = {needed:g} CPUs are more than there are, {place} {total.get('CPU', 0):g}: "
            "use fewer workers or fewer CPUs a worker"
        )
    if gpus > total.get("GPU", 0):
        raise ValueError(
            f"workers.use_gpu = True needs {gpus} GPUs, {gpus_per_worker} a worker, more than there are, as {place} "
            f"{total.get('GPU', 0):g}: choose --workers.no-use-gpu, or set RAY_ADDRESS to a cluster that has them"
        )
