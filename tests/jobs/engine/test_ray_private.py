"""Test that Ray and PyTorch still behave as `jobs.engine.ray_private` says: what fails here is no longer worked around."""

from __future__ import annotations

import inspect
import os
import queue
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import pytest
import ray
import torch.distributed as dist
from ray._private import services
from ray.train import Checkpoint, RunConfig
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback


@pytest.mark.parametrize("known", [TorchTrainer.__init__, RunConfig.__init__])
def test_no_public_name_takes_a_policy(known: Callable[..., Any]) -> None:
    assert not [name for name in inspect.signature(known).parameters if "policy" in name]


def test_what_is_free_on_a_node_is_not_public() -> None:
    assert not hasattr(ray, "available_resources_per_node")


def test_a_store_of_pytorch_listens_on_all_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    listening = [one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
    assert store.port == port
    assert [address.ip for address in listening if address.port == port] != ["127.0.0.1"]


def test_a_process_of_ray_is_in_the_group_of_the_one_that_starts_it() -> None:
    process = services.ConsolePopen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert os.getpgid(process.pid) == os.getpgid(0)
    finally:
        process.kill()
        process.wait()


def test_ray_listens_on_all_addresses_unless_it_is_told_otherwise() -> None:
    code = "from ray._private import ray_constants as it; print(it.ENABLE_RAY_CLUSTERS_ENV_VAR, it.ENABLE_RAY_CLUSTER)"
    run = subprocess.run([sys.executable, "-c", code], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert run.stdout.split() == ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "True"]


def test_ray_tune_is_not_given_a_checkpoint_of_ray_train() -> None:
    callback = object.__new__(TuneReportCallback)
    reported: queue.Queue[dict[str, Any]] = queue.Queue()
    callback._training_actor_item_queue = reported
    context: Any = None
    callback.after_report(context, [{"loss": 1.0}], Checkpoint("/there"))
    assert reported.get_nowait() == {"loss": 1.0, "checkpoint_path": "/there"}
