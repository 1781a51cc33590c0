"""Nodes, an object store and an MLflow server for training runs to which faults happen, and such a run itself."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlflow_support import Server
from node_support import RAY, Job, TwoNodes, two_nodes
from s3_support import ObjectStore, run_object_store
from support import LANGUAGE_MODEL_OPTIONS

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
    server: Server
    num_steps: int
    """Number of steps of every run."""
    seconds_of_trouble: float
    """How long a fault lasts that goes away by itself."""

    def start(self, name: str, num_workers: str) -> Job:
        """Start the job of a run, or go on with it."""
        options = [
            "gpt2-scratch-small", *LANGUAGE_MODEL_OPTIONS, f"--run.name={name}", f"--run.num-steps={self.num_steps}",
            "--run.log-every=10", "--run.checkpoint-every=20", "--run.max-restarts=4", "--run.max-wait-minutes=2",
            "--run.storage=s3://bucket/runs", f"--run.prepared={self.directory / 'prepared'}",
            f"--data.train={self.corpus / 'train'}", f"--data.validation={self.corpus / 'validation'}",
            f"--data.tokenizer={self.corpus / 'tokenizer'}", f"--workers.num-workers={num_workers}",
            "--workers.cpus-per-worker=1.5", f"--validation.every={self.num_steps}", f"--tracking.uri={self.server.uri}",
            "--tracking.no-system-metrics",
        ]  # fmt: skip
        return Job(*options, environment=self.cluster.environment)

    def losses(self, name: str) -> History:
        """Return the training losses of a run that MLflow holds."""
        values: History = {}
        for step, value in self.server.losses_of(name):
            values.setdefault(step, []).append(value)
        return values


@contextmanager
def run_site(
    corpus: Path, directory: Path, *, num_steps: int, seconds_of_trouble: float, program: Sequence[str] = RAY
) -> Iterator[Site]:
    """Run two nodes, a store and a server, with all their files in an empty directory.

    `program` is what starts a node, `RAY` or `RAY_OF_TESTS`.
    """
    (directory / "mlflow").mkdir(parents=True)
    clock, server = Clock(directory / "clock"), Server(directory / "mlflow")
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
            with two_nodes(environment, clock.environment, program) as cluster:
                yield Site(
                    directory=directory, corpus=corpus, cluster=cluster, clock=clock, store=store, server=server,
                    num_steps=num_steps, seconds_of_trouble=seconds_of_trouble,
                )  # fmt: skip
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


@dataclass
class DisturbedRun:
    """A run of one or two workers that is started again whenever it ends before its last step, as a person would do."""

    site: Site
    name: str
    job: Job
    num_starts: int = 1
    fault: str = ""
    """The last fault that has begun."""
    endings: list[Ending] = field(default_factory=list)
    """How every start ended that did not come to the last step."""

    @classmethod
    def begin(cls, site: Site, name: str) -> DisturbedRun:
        """Start a run."""
        return cls(site, name, site.start(name, "1:2"))

    def start_again(self) -> None:
        """Start the job, which has ended, again."""
        self.endings.append(Ending(status=self.job.end(), line=self.job.tail(1), fault=self.fault))
        if self.num_starts == _MAX_STARTS:
            raise RuntimeError(f"{self.name} does not end:\n{self.job.tail()}")
        self.job = self.site.start(self.name, "1:2")
        self.num_starts += 1

    def reach(self, step: int) -> None:
        """Wait until a job that still runs has shown a step, or the run has come to its end."""
        while not self.job.wait_for_step(step) or self.job.process.poll() is not None:
            if self.job.end() == 0:
                return
            self.start_again()

    @property
    def is_over(self) -> bool:
        """Whether the run has come to its last step, so that nothing can happen to it any more."""
        return self.job.process.poll() == 0

    def finish(self) -> None:
        """Wait until the job ends well."""
        while self.job.end() != 0:
            self.start_again()
