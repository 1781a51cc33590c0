"""Test that Ray and PyTorch still behave as `jobs.engine.ray_private` says: what fails here is no longer worked around."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta

import psutil
import torch.distributed as dist
from ray._private import services


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
