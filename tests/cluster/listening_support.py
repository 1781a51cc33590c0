"""Looks at the addresses on which a job and all processes that it has started listen."""

from __future__ import annotations

import ipaddress
import signal
from contextlib import suppress

import psutil


def family_of(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def send(number: signal.Signals, processes: list[psutil.Process]) -> None:
    """Send a signal to every process that has not ended meanwhile, as an idle worker of Ray may have."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def listening(processes: list[psutil.Process]) -> list[tuple[int, str, str]]:
    """Return process ID, name and address of every listening socket of some processes."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.append((process.pid, process.name(), connection.laddr.ip))
    return found


def is_loopback(address: str) -> bool:
    """Return whether an address, of IPv4, IPv6 or IPv4 within IPv6, is of this machine only."""
    parsed = ipaddress.ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback
