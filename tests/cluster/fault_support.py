"""Let a seeded schedule of faults happen to a training run, and compare it with a run that nothing happened to.

The run is a small language model on a cluster of two nodes, whose number of workers may change. Its checkpoints go to an
S3 server behind a proxy, its metrics to an MLflow server (`fault_site.py`). A full disk needs a file system of its own:
`test_survival.py` has that.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from fault_site import DisturbedRun, Ending, History, Site
from pyarrow.fs import FileSelector
from support import wait_for

from jobs.engine.resumption import list_name

# The last line of a traceback, or an error of the object store in its own words.
_BARE = re.compile(r"$|(\w+\.)*\w*(Error|Exception|Died|Interrupt)\b(:|$)|(error: )?(\w+Error: )?When .*AWS Error")


def kill_a_worker(run: DisturbedRun) -> None:
    """A worker is ended by SIGKILL, as the kernel does when memory is short."""
    wait_for(lambda: bool(run.site.cluster.training_workers()), seconds=120)
    run.site.cluster.training_workers()[0].kill()


def lose_a_node(run: DisturbedRun) -> None:
    """A node loses its power; another one comes when the run, if it had a worker there, goes on without it."""
    num_before = len(run.lines)
    run.site.cluster.node.kill()
    with suppress(TimeoutError):
        wait_for(lambda: any("the run goes on with 1" in line for line in run.lines[num_before:]), seconds=60)
    run.site.cluster.start_node()


def kill_a_raylet(run: DisturbedRun) -> None:
    """The raylet of a node is ended by SIGKILL, and its other processes follow; the node is started again."""
    node = run.site.cluster.node
    assert node.kill("raylet")
    node.process.wait()
    run.site.cluster.start_node()


def kill_the_driver(run: DisturbedRun) -> None:
    """The driver is ended by SIGKILL."""
    run.process.kill()


def end_the_driver(run: DisturbedRun) -> None:
    """The driver is told to end by SIGTERM."""
    run.process.send_signal(signal.SIGTERM)


def lose_the_head(run: DisturbedRun) -> None:
    """The head loses its power, and with it the cluster is lost; both nodes are started again."""
    run.site.cluster.close()
    run.end()
    run.site.cluster.start()


def kill_the_control_service(run: DisturbedRun) -> None:
    """Ray's control service is ended by SIGKILL; when the job has noticed it, both nodes are started again."""
    assert run.site.cluster.head.kill("gcs_server")
    run.end()
    run.site.cluster.close()
    run.site.cluster.start()


def kill_mlflow(run: DisturbedRun) -> None:
    """The MLflow server is ended by SIGKILL and comes back after some seconds."""
    run.site.server.kill()
    time.sleep(run.site.seconds_of_trouble)
    run.site.server.start()


def disturb_the_store(run: DisturbedRun, **behaviour: float) -> None:
    """For some seconds the store is slow, or some of its requests fail."""
    run.site.store.behave(**behaviour)
    time.sleep(run.site.seconds_of_trouble)
    run.site.store.behave()


def let_the_store_refuse_writes(run: DisturbedRun) -> None:
    """The store can only be read until the job has noticed it, which is at its next checkpoint."""
    run.site.store.behave(refuses_writes=True)
    run.end()
    run.site.store.behave()


def let_a_clock_jump(run: DisturbedRun) -> None:
    """The clock of a node goes an hour forward, and some seconds later two hours back."""
    run.site.clock.shift(3600.0)
    time.sleep(run.site.seconds_of_trouble)
    run.site.clock.shift(-3600.0)
    time.sleep(run.site.seconds_of_trouble)
    run.site.clock.shift(0.0)


def find_whole_checkpoints(run: DisturbedRun) -> list[str]:
    """Return the paths of the checkpoints to which every worker has added its list of files, oldest first."""
    store = run.site.store.filesystem
    found = store.get_file_info(FileSelector(f"bucket/runs/{run.name}", recursive=True, allow_not_found=True))
    lists = {file.path for file in found if file.path.endswith(".json")}
    whole = []
    for first in sorted(path for path in lists if path.endswith(f"/{list_name(0)}")):
        checkpoint = first.removesuffix(f"/{list_name(0)}")
        with store.open_input_stream(first) as source:
            num_workers = json.loads(source.read())["world_size"]
        if lists.issuperset(f"{checkpoint}/{list_name(rank)}" for rank in range(num_workers)):
            whole.append(checkpoint)
    return whole


def damage_the_newest_checkpoint(run: DisturbedRun) -> None:
    """The driver is killed, and a byte of the newest whole checkpoint changes.

    If there is no other one, the next start says so, and the checkpoint comes back. Damage to an upload that was not
    finished would mean nothing: the run does without it. Therefore the driver lives until there is a whole checkpoint, and
    nothing is changed before its workers, which train on for a while, are gone.
    """
    wait_for(lambda: bool(find_whole_checkpoints(run)), seconds=120)
    run.process.kill()
    run.end()
    wait_for(lambda: not run.site.cluster.training_workers(), seconds=120)
    whole = find_whole_checkpoints(run)
    store = run.site.store.filesystem
    files = store.get_file_info(FileSelector(whole[-1], recursive=True))
    newest = next(file.path for file in files if file.path.endswith("_states.pt"))
    with store.open_input_stream(newest) as source:
        content = source.read()
    damaged = bytearray(content)
    damaged[len(damaged) // 2] ^= 1
    with store.open_output_stream(newest) as target:
        target.write(bytes(damaged))
    if len(whole) == 1:
        run.start_again()
        run.end()
        with store.open_output_stream(newest) as target:
            target.write(content)


def lose_a_shard(run: DisturbedRun) -> None:
    """The driver is killed and a shard of the data is gone; the next start says so, and the shard comes back.

    Workers train on until they notice that their driver is gone. If they have trained the last step by then, the next start
    needs no data and ends well, and the fault is late.
    """
    run.process.kill()
    run.end()
    shard = min((run.site.directory / "prepared").glob("train-*/*.arrow"))
    away = run.site.directory / "away"
    shutil.move(shard, away)
    run.start_again()
    run.end()
    shutil.move(away, shard)


FAULTS: dict[str, Callable[[DisturbedRun], None]] = {
    "worker killed": kill_a_worker,
    "node lost": lose_a_node,
    "raylet killed": kill_a_raylet,
    "driver killed": kill_the_driver,
    "driver told to end": end_the_driver,
    "head lost": lose_the_head,
    "control service killed": kill_the_control_service,
    "MLflow killed": kill_mlflow,
    "store fails": partial(disturb_the_store, share_failing=0.05),  # 5 % of the requests for data
    "store slow": partial(disturb_the_store, latency=0.3),
    "store read-only": let_the_store_refuse_writes,
    "clock jumps": let_a_clock_jump,
    "checkpoint damaged": damage_the_newest_checkpoint,
    "shard gone": lose_a_shard,
}

MESSAGES = {
    "driver told to end": "the same command goes on from",
    "head lost": "does not answer: the cluster is lost",
    "control service killed": "does not answer: the cluster is lost",
    "store read-only": "the store refuses to write there",
    "checkpoint damaged": " is whole",
    "shard gone": ".arrow",
}
"""Fault → words that the last line of a job holds which ends because of it."""

Schedule = list[tuple[int, str]]
"""Steps and names of faults, in the order of the steps."""


def draw(seed: int, num_steps: int, num_faults: int = 3) -> Schedule:
    """Return the schedule of a seed; its faults begin in the first half of the run, as a fault may last long."""
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(30, num_steps // 2, 10), num_faults))
    return list(zip(steps, rng.sample(sorted(FAULTS), num_faults), strict=True))


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The run that nothing happened to."""

    losses: History
    batches_digest: str

    @classmethod
    def train(cls, site: Site, name: str = "undisturbed") -> Reference:
        """Train with one worker."""
        run = DisturbedRun(site, name, num_workers="1")
        if run.end():
            raise RuntimeError(run.tail())
        return cls(losses=site.losses(name), batches_digest=site.batches_digest(name))


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of a run to which faults happened."""

    num_lost: int
    """Number of steps whose loss is missing in MLflow."""
    num_repeated: int
    """Number of steps whose loss is recorded with two values that differ."""
    has_same_batches: bool
    """Whether the batches were those of the undisturbed run, in the same order."""
    largest_difference: float
    """Largest difference of a step's loss from that of the undisturbed run."""
    num_late: int
    """Number of faults that began, or went on, after the run had come to its last step."""
    unexplained: list[str]
    """What is wrong with the last lines of starts that ended early."""
    endings: list[Ending]
    """How every start ended that did not come to the last step."""
    lines: list[str]
    """What all starts have printed."""

    @property
    def is_good(self) -> bool:
        """Whether the run is equal to that which nothing happened to, although all faults did, and ended with clear words."""
        is_equal = self.has_same_batches and not (self.num_lost or self.num_repeated) and self.largest_difference < 1e-5
        return is_equal and not self.num_late and not self.unexplained


def find_unexplained(endings: list[Ending]) -> list[str]:
    """Return a line for every start that ended early with words that a person does not understand; SIGKILL leaves none."""
    found = []
    for ending in endings:
        wanted = MESSAGES.get(ending.fault, "")
        if ending.status != -signal.SIGKILL and (_BARE.match(ending.line) or wanted not in ending.line):
            found.append(f"{ending.fault or 'no fault'}: status {ending.status}, {ending.line!r} without {wanted!r}")
    return found


def run_schedule(schedule: Schedule, site: Site, reference: Reference, name: str) -> Report:
    """Train while the faults of a schedule happen, and compare."""
    run, num_late = DisturbedRun(site, name), 0
    try:
        for step, fault in schedule:
            run.reach(step)
            if not run.is_over:
                run.fault = fault
                FAULTS[fault](run)
            num_late += run.is_over
        run.finish()
    finally:
        run.process.kill()  # a schedule that fails must not leave a job beside the next one
    losses = site.losses(name)
    steps = reference.losses.keys() & losses.keys()
    return Report(
        num_lost=site.num_steps - len(steps),
        num_repeated=sum(max(losses[step]) - min(losses[step]) > 1e-5 for step in steps),
        has_same_batches=site.batches_digest(name) == reference.batches_digest,
        largest_difference=max(abs(losses[step][-1] - reference.losses[step][-1]) for step in steps),
        num_late=num_late,
        unexplained=find_unexplained(run.endings),
        endings=run.endings,
        lines=run.lines,
    )
