"""Let a seeded schedule of faults happen to a training run, and tell whether the run is that which nothing happened to.

The run is a small language model on a cluster of two nodes, whose number of workers may change. Its checkpoints go to an
S3 server behind a proxy, its metrics to an MLflow server. The job is started again whenever it ends before its last step,
as a person or a scheduler would do. Faults that this cannot cause on one machine are the clock of a node and, without a
file system of its own, a full disk (`test_survival.py` has that).
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlflow_support import Server
from node_support import Job, TwoNodes, two_nodes
from pyarrow.fs import FileSelector
from s3_support import ObjectStore, run_object_store
from support import LANGUAGE_MODEL_OPTIONS

NUM_STEPS = 300
_MAX_STARTS = 12
_SECONDS_OF_TROUBLE = 10.0


@dataclass
class World:
    """What a run depends on: nodes, stores and servers, and the job itself."""

    directory: Path
    corpus: Path
    cluster: TwoNodes
    store: ObjectStore
    server: Server
    job: Job | None = None
    notes: list[str] = field(default_factory=list)
    """What the job said when it ended before its last step."""

    def start(self, name: str, num_workers: str) -> Job:
        """Start the job of a run, or go on with it."""
        options = [
            "gpt2-scratch-small", *LANGUAGE_MODEL_OPTIONS, f"--run.name={name}", f"--run.num-steps={NUM_STEPS}",
            "--run.log-every=5", "--run.checkpoint-every=10", "--run.max-restarts=9", "--run.max-wait-minutes=2",
            "--run.storage=s3://bucket/runs", f"--run.prepared={self.directory / 'prepared'}",
            f"--data.train={self.corpus / 'train'}", f"--data.validation={self.corpus / 'validation'}",
            f"--data.tokenizer={self.corpus / 'tokenizer'}", f"--workers.num-workers={num_workers}",
            "--workers.cpus-per-worker=1.5", f"--validation.every={NUM_STEPS}", f"--tracking.uri={self.server.uri}",
            "--tracking.no-system-metrics",
        ]  # fmt: skip
        self.job = Job(*options, environment=self.cluster.environment)
        return self.job

    @property
    def running(self) -> Job:
        """The job."""
        assert self.job is not None
        return self.job

    def finish(self, name: str, num_workers: str) -> int:
        """Start the job again until it ends well, and return how often that was necessary."""
        for number in range(_MAX_STARTS):
            if self.running.end() == 0:
                return number
            self.notes.append(self.running.tail(1))
            self.start(name, num_workers)
        raise AssertionError(f"{name} does not end:\n{self.running.tail()}")

    def history(self, name: str, key: str) -> dict[int, list[float]]:
        """Return step → all values of a metric that the MLflow store holds of a run."""
        found: dict[int, list[float]] = {}
        for step, value in self.server.metrics_of(name, key):
            found.setdefault(step, []).append(value)
        return found


def kill_a_worker(world: World) -> None:
    """A worker is ended by SIGKILL, as the kernel does when memory is short."""
    (world.cluster.node.processes("ray::RayTrainWorker") or world.cluster.head.processes("ray::RayTrainWorker"))[
        0
    ].kill()


def lose_a_node(world: World) -> None:
    """A node loses its power; another one comes some seconds later."""
    world.cluster.node.kill()
    time.sleep(_SECONDS_OF_TROUBLE)
    world.cluster.start_node()


def kill_the_driver(world: World) -> None:
    """The driver is ended by SIGKILL."""
    world.running.process.kill()


def end_the_driver(world: World) -> None:
    """The driver is told to end by SIGTERM."""
    world.running.process.send_signal(signal.SIGTERM)


def lose_the_head(world: World) -> None:
    """The head with Ray's control service is lost, and with it the cluster; both nodes are started again."""
    world.cluster.close()
    world.running.end()
    world.cluster.start()


def kill_mlflow(world: World) -> None:
    """The MLflow server is ended by SIGKILL and comes back after some seconds."""
    world.server.kill()
    time.sleep(_SECONDS_OF_TROUBLE)
    world.server.start()


def let_the_store_fail(world: World) -> None:
    """For some seconds 5 % of the requests for data fail."""
    world.store.behave(share_failing=0.05)
    time.sleep(_SECONDS_OF_TROUBLE)
    world.store.behave()


def slow_the_store(world: World) -> None:
    """For some seconds every request takes a third of a second more."""
    world.store.behave(latency=0.3)
    time.sleep(_SECONDS_OF_TROUBLE)
    world.store.behave()


def damage_the_newest_checkpoint(world: World) -> None:
    """The driver is killed, and a byte of the newest checkpoint changes."""
    world.running.process.kill()
    world.running.end()
    store = world.store.filesystem
    files = store.get_file_info(FileSelector("bucket/runs/disturbed", recursive=True))
    states = [file.path for file in files if file.path.endswith("_states.pt")]
    newest = max(states, key=lambda path: path.split("checkpoint-")[1])
    with store.open_input_stream(newest) as source:
        content = bytearray(source.read())
    content[len(content) // 2] ^= 1
    with store.open_output_stream(newest) as target:
        target.write(bytes(content))


def lose_a_shard(world: World) -> None:
    """The driver is killed and a shard of the data is gone; the next start says so, and the shard comes back."""
    world.running.process.kill()
    world.running.end()
    shard = min((world.directory / "prepared").glob("train-*/*.arrow"))
    away = world.directory / "away"
    shutil.move(shard, away)
    job = world.start("disturbed", "1:2")
    assert job.end() != 0, job.tail()
    assert shard.name in "\n".join(line for _, line in job.lines), job.tail()
    world.notes.append(f"(shard gone) {job.tail(1)}")
    shutil.move(away, shard)


FAULTS: dict[str, Callable[[World], None]] = {
    "worker killed": kill_a_worker,
    "node lost": lose_a_node,
    "driver killed": kill_the_driver,
    "driver told to end": end_the_driver,
    "head lost": lose_the_head,
    "MLflow killed": kill_mlflow,
    "store fails": let_the_store_fail,
    "store slow": slow_the_store,
    "checkpoint damaged": damage_the_newest_checkpoint,
    "shard gone": lose_a_shard,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a schedule did, and what became of the run."""

    events: list[tuple[int, str]]
    """Step and fault."""
    num_starts: int
    """How often the job was started."""
    lost: int
    """Number of steps whose loss or digest is missing in MLflow."""
    repeated: int
    """Number of steps whose batch or loss is recorded with two values."""
    largest_difference: float
    """Largest difference of a step's loss from that of the undisturbed run."""
    other_batches: int
    """Number of steps whose batch is another one."""
    notes: list[str]
    """Last line of every start that ended before the last step."""

    @property
    def is_good(self) -> bool:
        """Whether the run is that which nothing happened to."""
        return not (self.lost or self.repeated or self.other_batches) and self.largest_difference < 1e-5


def draw(seed: int, num_faults: int = 3) -> list[tuple[int, str]]:
    """Return the steps and faults of a schedule."""
    drawn = random.Random(seed)
    steps = sorted(drawn.sample(range(20, NUM_STEPS - 20, 10), num_faults))
    return list(zip(steps, drawn.sample(sorted(FAULTS), num_faults), strict=True))


@contextmanager
def world(corpus: Path, directory: Path) -> Iterator[World]:
    """Run everything that a run depends on."""
    (directory / "mlflow").mkdir(parents=True)
    server = Server(directory / "mlflow")
    server.start()
    try:
        with run_object_store(directory / "s3.log") as store:
            environment = {**store.environment, "TEMPNET_CACHE": str(directory / "cache"), "TMPDIR": str(directory)}
            with two_nodes(environment) as cluster:
                yield World(directory, corpus, cluster, store, server)
    finally:
        server.kill()


def run_schedule(events: list[tuple[int, str]], corpus: Path, directory: Path) -> Report:
    """Train undisturbed and disturbed, and compare.

    Args:
        events: steps and faults, in the order of the steps.
        corpus: directory with `train`, `validation` and `tokenizer`.
        directory: empty directory for everything else.
    """
    with world(corpus, directory) as it:
        it.start("undisturbed", "1")
        assert it.running.end() == 0, it.running.tail()
        it.start("disturbed", "1:2")
        num_starts = 1
        for step, fault in events:
            while not it.running.wait_for_step(step):
                if it.running.end() == 0:
                    break
                it.notes.append(it.running.tail(1))
                it.start("disturbed", "1:2")
                num_starts += 1
            FAULTS[fault](it)
        num_starts += it.finish("disturbed", "1:2")
        losses, expected = it.history("disturbed", "train/loss"), it.history("undisturbed", "train/loss")
        digests, batches = (
            it.history("disturbed", "train/batch_digest"),
            it.history("undisturbed", "train/batch_digest"),
        )
        both = expected.keys() & losses.keys() & digests.keys()
        return Report(
            events=events,
            num_starts=num_starts,
            lost=NUM_STEPS - len(both),
            repeated=sum(len(set(digests[step])) > 1 or max(losses[step]) - min(losses[step]) > 1e-5 for step in both),
            largest_difference=max(abs(losses[step][-1] - expected[step][-1]) for step in both),
            other_batches=sum(digests[step][-1] != batches[step][-1] for step in both),
            notes=it.notes,
        )
