"""Nodes, an object store and an MLflow server for training runs to which faults happen, and such a run itself."""

from __future__ import annotations

import mmap
import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from s3_support import ObjectStore, run_object_store
from server_support import BIN, RAY, MlflowServer, Node, free_port, wait_for_ports
from support import LANGUAGE_MODEL_OPTIONS

from jobs.engine.cluster import ensure_token

_MAX_STARTS = 12

History = dict[int, list[float]]
"""Step → all values of a metric that MLflow holds of a run."""


class Clock:
    """The wall clock of a node, as its Python processes see it (`shifted_clock/sitecustomize.py`)."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(struct.pack("d", 0.0))
        with file.open("r+b") as opened:
            self._seconds = mmap.mmap(opened.fileno(), 8)
        self.environment = {
            "PYTHONPATH": str(Path(__file__).parent / "shifted_clock"),
            "TEST_CLOCK": str(file),
        }

    def shift(self, seconds: float) -> None:
        """Let the clock differ from the true time by some seconds."""
        self._seconds[:] = struct.pack("d", seconds)


class TwoNodes:
    """A cluster of a head and another node, each with room for one worker that reserves 1.5 CPUs, and its reader.

    Args:
        environment: environment variables beside those of this process.
        node_environment: environment variables that only the other node has.
        program: what starts a node, `RAY` or `RAY_OF_TESTS`.
    """

    def __init__(self, environment: dict[str, str], node_environment: dict[str, str], program: Sequence[str]) -> None:
        self._port, self._program = free_port(), program
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_worker_niceness": "0",
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
            "RAY_num_workers_soft_limit": "4",
            **environment,
        }
        self._node_environment = node_environment
        ensure_token()
        self.start()

    def start(self) -> None:
        """Start both nodes."""
        self.environment.pop("RAY_ADDRESS", None)
        self.head = Node(
            "--head", f"--port={self._port}", "--include-dashboard=false", num_cpus=2, environment=self.environment,
            program=self._program,
        )  # fmt: skip
        wait_for_ports(self.head.process, self._port)
        self.environment["RAY_ADDRESS"] = f"127.0.0.1:{self._port}"
        time.sleep(5)
        self.start_node()

    def start_node(self) -> None:
        """Start the other node; it is there some seconds later."""
        address, environment = self.environment["RAY_ADDRESS"], self.environment | self._node_environment
        self.node = Node(f"--address={address}", num_cpus=2, environment=environment, program=self._program)

    def training_workers(self) -> list[psutil.Process]:
        """Return the processes that train, those of the other node first."""
        return [worker for node in (self.node, self.head) for worker in node.processes("ray::RayTrainWorker")]

    def close(self) -> None:
        """End both nodes."""
        self.node.kill()
        self.head.kill()


@dataclass(frozen=True, kw_only=True)
class Site:
    """What runs depend on."""

    directory: Path
    corpus: Path
    """Directory with `train`, `validation` and `tokenizer`."""
    cluster: TwoNodes
    clock: Clock
    """Clock of the node that is not the head."""
    store: ObjectStore
    server: MlflowServer
    num_steps: int
    """Number of steps of every run."""
    seconds_of_trouble: float
    """How long a fault lasts that goes away by itself."""

    def options(self, name: str, num_workers: str) -> list[str]:
        """Return preset and options of a run."""
        return [
            "gpt2-scratch-small", *LANGUAGE_MODEL_OPTIONS, f"--run.name={name}", f"--run.num-steps={self.num_steps}",
            "--run.log-every=10", "--run.checkpoint-every=20", "--run.max-restarts=4", "--run.max-wait-minutes=2",
            "--run.storage=s3://bucket/runs", f"--run.prepared={self.directory / 'prepared'}",
            f"--data.train={self.corpus / 'train'}", f"--data.validation={self.corpus / 'validation'}",
            f"--data.tokenizer={self.corpus / 'tokenizer'}", f"--workers.num-workers={num_workers}",
            "--workers.cpus-per-worker=1.5", "--workers.placement=spread", f"--validation.every={self.num_steps}",
            f"--tracking.uri={self.server.uri}", "--tracking.no-system-metrics",
        ]  # fmt: skip

    def losses(self, name: str) -> History:
        """Return the training losses of a run that MLflow holds, in the order in which they were logged."""
        values: History = {}
        for step, value in self.server.query(
            "SELECT step, value FROM metrics JOIN runs USING (run_uuid) WHERE name = ? AND key = 'train/loss' "
            "ORDER BY timestamp", name,
        ):  # fmt: skip
            values.setdefault(step, []).append(value)
        return values

    def batches_digest(self, name: str) -> str:
        """Return the digest of all batches that a run had."""
        query = "SELECT value FROM tags JOIN runs USING (run_uuid) WHERE name = ? AND key = 'batches_digest'"
        ((digest,),) = self.server.query(query, name)
        return str(digest)


@contextmanager
def run_site(
    corpus: Path, directory: Path, *, num_steps: int, seconds_of_trouble: float, program: Sequence[str] = RAY
) -> Iterator[Site]:
    """Run two nodes, a store and a server, with all their files in an empty directory."""
    (directory / "mlflow").mkdir(parents=True)
    clock, server = Clock(directory / "clock"), MlflowServer(directory / "mlflow")
    server.start()
    try:
        with run_object_store(directory / "s3.log") as store:
            environment = {
                **store.environment,
                "TEMPNET_CACHE": str(directory / "cache"),
                "TMPDIR": str(directory),
                # Ray waits so long for a control service that is lost. With its default of a minute the run would be over.
                "RAY_gcs_rpc_server_reconnect_timeout_s": "30",
            }
            cluster = TwoNodes(environment, clock.environment, program)
            try:
                yield Site(
                    directory=directory, corpus=corpus, cluster=cluster, clock=clock, store=store, server=server,
                    num_steps=num_steps, seconds_of_trouble=seconds_of_trouble,
                )  # fmt: skip
            finally:
                cluster.close()
    finally:
        server.kill()


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a start of a job ended before the last step."""

    status: int
    """Exit status; −9 after SIGKILL."""
    line: str
    """The last line that the job printed."""
    fault: str
    """The last fault that had begun; empty if there was none."""


class DisturbedRun:
    """A run that is started again whenever its job ends before the last step, as a person would do."""

    def __init__(self, site: Site, name: str, num_workers: str = "1:2") -> None:
        self.site, self.name, self.num_workers = site, name, num_workers
        self.fault = ""
        """The last fault that has begun."""
        self.endings: list[Ending] = []
        """How every start ended that did not come to the last step."""
        self.lines: list[str] = []
        """What all jobs have printed."""
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "jobs.train_lm", *self.site.options(self.name, self.num_workers)]
        self.process = subprocess.Popen(
            command, env=self.site.cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._num_before = len(self.lines)
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip())

    def end(self) -> int:
        """Wait for the end of the job and return its exit status."""
        status = self.process.wait(timeout=600)
        self._reader.join(timeout=10)
        return status

    def start_again(self) -> None:
        """Start the job, which has ended, again."""
        self.endings.append(Ending(status=self.end(), line=self.lines[-1] if self.lines else "", fault=self.fault))
        if len(self.endings) == _MAX_STARTS:
            raise RuntimeError(f"{self.name} does not end:\n{self.tail()}")
        self._start()

    def tail(self) -> str:
        """Return the last lines."""
        return "\n".join(self.lines[-30:])

    def reach(self, step: int) -> None:
        """Wait until a job that still runs has shown a step, or the run has come to its end."""
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            status = self.process.poll()
            shown = (re.match(r"step +(\d+)/", line) for line in self.lines[self._num_before :])
            if status == 0 or (status is None and any(match and int(match[1]) >= step for match in shown)):
                return
            if status is not None:
                self.start_again()
            time.sleep(0.05)
        raise TimeoutError(f"step {step} was not reached in:\n{self.tail()}")

    @property
    def is_over(self) -> bool:
        """Whether the run has come to its last step, so that nothing can happen to it any more."""
        return self.process.poll() == 0

    def finish(self) -> None:
        """Wait until the job ends well."""
        while self.end() != 0:
            self.start_again()
