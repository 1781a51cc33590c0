"""Run an MLflow server on loopback that a test or a benchmark can kill and start again."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from server_support import WITHOUT_BACKGROUND_JOBS, free_port, wait_for_ports
from support import BIN, wait_for


class Server:
    """Runs `mlflow server` on loopback, with the same store and the same port at every start."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            str(BIN / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.directory / 'mlflow.db'}",
            "--artifacts-destination", str(self.directory / "artifacts"),
        ]  # fmt: skip
        with (self.directory / "server.log").open("ab") as log:
            # The server has its own session, so that its workers get the signals too.
            self._process = subprocess.Popen(
                command, env=os.environ | WITHOUT_BACKGROUND_JOBS, stdout=log, stderr=log, start_new_session=True
            )
        wait_for_ports(self._process, self.port)
        # The workers of the server take a while to load after the port is open.
        wait_for(self._answers)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill the server and all its workers, and return when none of them can write any more."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            group = self._process.pid
            wait_for(lambda: not self._has_processes(group), seconds=60)
        self._process = None

    @staticmethod
    def _has_processes(group: int) -> bool:
        """Return whether any process of a group still runs; one that ended but was not waited for does not count."""
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                    return True
        return False

    def metrics(self) -> list[tuple[str, int, float]]:
        """Return key, step and value of every metric in the store, read without the server, which may be down."""
        with sqlite3.connect(f"file:{self.directory / 'mlflow.db'}?mode=ro", uri=True) as store:
            return store.execute("SELECT key, step, value FROM metrics").fetchall()

    def losses_of(self, run: str) -> list[tuple[int, float]]:
        """Return step and training loss of the run of a name, in the order in which they were logged."""
        return self._rows("SELECT step, value FROM metrics", run, "train/loss", "ORDER BY timestamp")

    def tag_of(self, run: str, key: str) -> str:
        """Return a tag of the run of a name."""
        ((value,),) = self._rows("SELECT value FROM tags", run, key)
        return str(value)

    def _rows(self, what: str, run: str, key: str, order: str = "") -> list[Any]:
        with sqlite3.connect(f"file:{self.directory / 'mlflow.db'}?mode=ro", uri=True) as store:
            query = f"{what} JOIN runs USING (run_uuid) WHERE name = ? AND key = ? {order}"
            return store.execute(query, (run, key)).fetchall()

    def statuses(self) -> list[str]:
        with sqlite3.connect(f"file:{self.directory / 'mlflow.db'}?mode=ro", uri=True) as store:
            return [status for (status,) in store.execute("SELECT status FROM runs")]
