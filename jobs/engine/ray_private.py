"""Everything that the jobs use of Ray beyond its public interface; nothing else here imports a private name of Ray.

Each part names the behaviour of Ray 2.60 that it works around, so that it can go with a Ray that does better. Policies and
their errors do not exist publicly at all. torch is not imported here: that would double the start of Ray Train's cleaner.
"""

from __future__ import annotations

import atexit
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services, state, worker
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray.train import Checkpoint
from ray.train._internal.session import get_session
from ray.train._internal.utils import get_address_and_port
from ray.train.v2._internal.callbacks import placement_group_callback
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError as WorkerGroupStartupFailedError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError as WorkerGroupStartupTimeoutError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError as WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.controller import placement_group_cleaner
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy as DefaultFailurePolicy
from ray.train.v2._internal.execution.failure_handling import FailureDecision as FailureDecision
from ray.train.v2._internal.execution.scaling_policy import NoopDecision as NoopDecision
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision as ResizeDecision
from ray.train.v2._internal.execution.scaling_policy import ScalingDecision as ScalingDecision
from ray.train.v2._internal.execution.scaling_policy import ScalingPolicy as ScalingPolicy
from ray.util.state.exception import RayStateApiException

from pipelines.storage import resolve


def set_policies(
    trainer: Any, *, failure_policy: DefaultFailurePolicy, scaling_policy: ScalingPolicy | None = None
) -> None:
    """Give a trainer policies of its own and a cleaner that asks its own cluster; None: the number of workers is fixed."""
    create_callbacks, run = trainer._create_default_callbacks, trainer._initialize_and_run_controller
    policies: dict[str, Any] = {"failure_policy": failure_policy}
    if scaling_policy is not None:
        policies["scaling_policy"] = scaling_policy
    theirs = placement_group_callback.PlacementGroupCleanerCallback
    trainer._create_default_callbacks = lambda: [
        _CleanerCallback() if type(callback) is theirs else callback for callback in create_callbacks()
    ]
    trainer._initialize_and_run_controller = lambda **settings: run(**{**settings, **policies})


def forget_snapshot(directory: str) -> None:
    """Delete Ray Train's record of a run's checkpoints: it does not start from one that is damaged or of another version."""
    filesystem, path = resolve(f"{directory}/checkpoint_manager_snapshot.json")
    if filesystem.get_file_info(path).is_file:
        filesystem.delete_file(path)


def is_preempted() -> bool:
    """Return whether a node of this run will be taken away; the public question lets all workers wait for each other."""
    return get_train_context().preemption_context.preemption_info is not None


# Ray Train's cleaner: a detached actor, one for every run, that frees the reserved resources when the controller is gone.
#
# It asks the state API whether the controller lives. Without a dashboard nobody answers: a trial that Ray Tune stops keeps
# its resources for ever. With several clusters on a machine it asks the one that was started last, and ends a healthy run.
# The control service, to which its process is connected anyway, knows every actor of its cluster and no other.


def is_actor_alive(actor_id: str, timeout: int) -> bool:
    """Return whether this process's cluster has an actor that is not dead; in the place of Ray Train's function."""
    try:
        return state.actors(actor_id).get("State", "DEAD") != "DEAD"
    except Exception as error:  # Ray raises no more specific one; after this one the cleaner asks again
        raise RayStateApiException(f"the control service does not answer: {error}") from error


class OwnClusterCleaner(placement_group_cleaner.PlacementGroupCleaner):
    """Runs in its own process, in which it replaces Ray Train's question to the state API."""

    def __init__(self, **settings: Any) -> None:
        placement_group_cleaner.is_actor_alive = is_actor_alive
        super().__init__(**settings)
        # A controller that is ended before it has called `start_monitoring` would leave a cleaner that watches nobody.
        self.start_monitoring()


class _CleanerCallback(placement_group_callback.PlacementGroupCleanerCallback):  # runs in a run's controller
    def after_controller_start(self, train_run_context: Any) -> None:
        placement_group_callback.PlacementGroupCleaner = OwnClusterCleaner  # type: ignore[misc, assignment]
        super().after_controller_start(train_run_context)


# The store through which workers find each other (PyTorch's TCPStore): PyTorch lets it listen on all addresses of the
# machine, without a token, and has no setting for that; but a store that is open already is taken as it is.

_open_stores: list[Any] = []  # PyTorch closes a store that nobody holds


def open_store() -> tuple[str, int]:
    """Return the address of this node as Ray knows it, and a port; on loopback a store listens there, and nowhere else."""
    import torch.distributed as dist

    address, port = get_address_and_port()
    if address not in ("127.0.0.1", "::1"):
        return address, port
    family = socket.AF_INET6 if address == "::1" else socket.AF_INET
    settings: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        _open_stores.append(dist.TCPStore(address, port, **settings, master_listen_fd=server.detach()))
    return address, port


def loopback_rendezvous() -> Any:
    """Return Ray Train's settings of PyTorch's process group, with a store that listens on loopback where Ray does."""
    from ray.train.torch import TorchConfig
    from ray.train.torch.config import _TorchBackend

    class Backend(_TorchBackend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            execute = worker_group.execute_single

            def execute_single(rank: int, function: Any, *arguments: Any, **named: Any) -> Any:
                return execute(rank, open_store if function is get_address_and_port else function, *arguments, **named)

            worker_group.execute_single = execute_single
            super().on_start(worker_group, backend_config)
            del worker_group.execute_single

    class Rendezvous(TorchConfig):
        @property
        def backend_cls(self) -> type[_TorchBackend]:
            return Backend

    return Rendezvous()


# The first call of an actor is sent when the caller knows that it is alive. While the actor is being created, that depends on
# one message of Ray, which was seen to stay away for good.


def wait_until_started(actor: Any) -> None:
    """Wait, without limit, until Ray's table has an actor of which no method was called yet as alive, or as dead."""
    while state.actors(actor._actor_id.hex()).get("State") not in ("ALIVE", "DEAD"):
        time.sleep(0.05)


# Ray's processes.


def listen_on_loopback() -> None:
    """Have Ray listen on loopback, unless RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1 asks for all addresses."""
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    os.environ.setdefault(name, "0")  # for the processes that Ray starts; this one has read it already
    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(name, False)


@contextmanager
def in_a_group_of_their_own() -> Iterator[None]:
    """Give Ray's processes groups of their own: a signal to the job's group, as `timeout` sends it, must not end them."""
    original = services.ConsolePopen
    services.ConsolePopen = partial(original, process_group=0)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        services.ConsolePopen = original  # type: ignore[misc]


def is_raylet_lost() -> bool:
    """Return whether the raylet of the Ray that this process has started has ended; nothing else says so for minutes."""
    node = worker._global_node
    return node is not None and any(info.process.poll() is not None for info in node.all_processes.get("raylet", []))


def end_with_this_process() -> None:
    """Have every process of the Ray that this process has started end with it, also those that a killed raylet has left."""
    node, owner = worker._global_node, os.getpid()
    if node is None:
        return
    # Every process that Ray starts here leads a group (`in_a_group_of_their_own`), in which its own children are.
    groups = {info.process.pid for infos in node.all_processes.values() for info in infos}

    def end() -> None:
        if os.getpid() != owner:  # a fork
            return
        ray.shutdown(_exiting_interpreter=True)  # first, as Ray itself does when the interpreter exits
        for process in psutil.process_iter(["cmdline"]):
            is_of_ray = (process.info["cmdline"] or [""])[0].startswith("ray::")  # the number may be another's by now
            with suppress(psutil.Error, OSError):
                if is_of_ray and os.getpgid(process.pid) in groups:
                    process.kill()

    atexit.register(end)


def find_started_cluster() -> str:
    """Return HOST:PORT of the cluster that `ray start` has started on this machine; empty if there is none."""
    return services.find_bootstrap_address(None) or ""


def address_that_ray_asks(address: str) -> str:
    """Return what Ray makes of an address: loopback for that of this machine, where a head may not listen."""
    return services.canonicalize_bootstrap_address(address) or address


def local_resources() -> dict[str, float]:
    """Return the resources that a Ray on this machine would have, by name, as Ray itself finds them when it starts."""
    found = ResourceAndLabelSpec()
    found.resolve(is_head=True, node_ip_address="127.0.0.1")
    return dict(found.to_resource_dict())


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return node ID → its resources that nobody uses; publicly Ray tells only their sum over all nodes."""
    return dict(state.available_resources_per_node())


# Ray Tune's session.


def reporting_checkpoints(describe: Callable[[Mapping[str, Any]], Mapping[str, str]]) -> None:
    """Let what Ray Train reports to this trial of Ray Tune carry a checkpoint, which `TuneReportCallback` leaves out."""
    session: Any = get_session()
    report = session.report

    def report_with_checkpoint(metrics: dict[str, Any], checkpoint: Checkpoint | None = None) -> None:
        if checkpoint is not None or "checkpoint_path" not in metrics:
            report(metrics, checkpoint=checkpoint)
            return
        with tempfile.TemporaryDirectory() as directory:
            for name, content in describe(metrics).items():
                Path(directory, name).write_text(content)
            report(metrics, checkpoint=Checkpoint.from_directory(directory))

    session.report = report_with_checkpoint
