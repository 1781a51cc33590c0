"""Looks at the addresses on which a job and all processes that it has started listen."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

import psutil


def listening(pid: int) -> list[tuple[int, str, str]]:
    """Return process ID, name and address of every listening socket of a process and of its descendants."""
    found = []
    job = psutil.Process(pid)
    for process in [job, *job.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # an idle worker may end meanwhile
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.append((process.pid, process.name(), connection.laddr.ip))
    return found


def is_loopback(address: str) -> bool:
    """Return whether an address, of IPv4, IPv6 or IPv4 within IPv6, is of this machine only."""
    parsed = ipaddress.ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback
