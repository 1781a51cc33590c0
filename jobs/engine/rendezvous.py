"""The place where the workers of a run meet: on loopback where all of them are on one machine that listens there.

The first worker opens a store (PyTorch's TCPStore) through which all of them find each other. PyTorch lets it listen on all
addresses of the machine, without a token, and has no setting for that; but a store that is open already is taken as it is.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import torch.distributed as dist
from ray.train._internal.utils import get_address_and_port
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

_open_stores: list[dist.TCPStore] = []  # PyTorch closes a store that nobody holds


def open_store() -> tuple[str, int]:
    """Choose the address of this worker's store, and open the store if the address is on loopback.

    Returns:
        The address of this node as Ray knows it, and a port. On loopback (`jobs.engine.cluster`) a store listens there, and
        nowhere else, until this process ends; otherwise the port is free, and PyTorch will open the store.
    """
    address, port = get_address_and_port()
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a node may be known by its name
        return address, port
    if not parsed.is_loopback:
        return address, port
    with socket.create_server(
        (address, 0), family=socket.AF_INET6 if parsed.version == 6 else socket.AF_INET
    ) as server:
        port = server.getsockname()[1]
        _open_stores.append(
            dist.TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=server.detach(),
            )
        )
    return address, port


class _Group:
    """A group of workers whose first one opens its store when Ray Train asks for the address of it."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __len__(self) -> int:
        return len(self._group)

    def execute_single(self, rank: int, function: Any, *arguments: Any, **named: Any) -> Any:
        chosen = open_store if function is get_address_and_port else function
        return self._group.execute_single(rank, chosen, *arguments, **named)


class _Backend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        super().on_start(_Group(worker_group), backend_config)  # type: ignore[arg-type]


class Rendezvous(TorchConfig):
    """Ray Train's settings of PyTorch's process group, with a store that listens on loopback where Ray does."""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        """The class that makes the process group."""
        return _Backend
