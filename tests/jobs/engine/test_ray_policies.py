"""Test what is said of a failed group of workers, when it is started again, and how many workers an elastic run has."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from ray.train import CheckpointConfig, FailureConfig, ScalingConfig
from ray.train.v2._internal.exceptions import (
    CheckpointManagerInitializationError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError
from safetensors.torch import save_file

from jobs.engine import ray_failures, ray_train, resumption
from jobs.engine.checkpoint import SafeCheckpointEngine
from jobs.engine.config import OptimizerSection, RunSection, TrainingConfig, WorkersSection
from jobs.engine.ray_failures import RestartPolicy, as_fatal, describe_failure
from jobs.engine.ray_private import forget_snapshot
from jobs.engine.ray_train import ElasticPolicy
from jobs.engine.resumption import DiskFullError, Resumption, naming_full_disk, write_record
from pipelines.storage import read_json, write_json
from pipelines.store_errors import explain_write

# Ray 2.60 reports deaths in these words.
KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
\tactor_id: 83b37a93fae0216c2a33e35e01000000
\tpid: 2219
\tnamespace: 1db8d55f-49af-413b-a626-acb8da032140
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed by \
the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly due to \
SIGSEGV or another unexpected error."""
NODE_LOST = """The actor died unexpectedly before finishing this task.
\tpid: 77
\tip: 192.0.2.9
The actor died because its node has died. Node Id: 5a9a78993906f66d51b66c2db77f4c7a4621e3b3d436e83adc081666
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"""


def died(message: str) -> Exception:
    error = ActorDiedError()
    RayActorError.__init__(error, None, message)
    return WorkerHealthCheckFailedError("A worker health check failed.", failure=error)


def group_error(**workers: Exception) -> WorkerGroupError:
    return WorkerGroupError("…", {int(name[1:]): error for name, error in workers.items()})


PEER = RuntimeError("Connection closed by peer [192.0.2.2]:1234\nand more")
TASK = RayTaskError("read", "Traceback\n…", FileNotFoundError("no 'train-0.arrow'")).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        # The reason is that of the worker that died, and not that of its peers.
        (group_error(_0=PEER, _1=died(KILLED)), "worker 1: its process 2219 on 192.0.2.2 died: killed by a signal"),
        (
            group_error(_1=died(NODE_LOST)),
            "worker 1: its node 192.0.2.9 was lost (terminated unexpectedly: health check",
        ),
        # A failed task is named by what failed in it.
        (group_error(_1=TASK), "worker 1: FileNotFoundError: no 'train-0.arrow'"),
    ],
    ids=["killed", "node lost", "task"],
)
def test_the_reason_is_one_line(error: WorkerGroupError, reason: str) -> None:
    assert describe_failure(error).startswith(reason)
    assert "\n" not in describe_failure(error)


def policy(run: Path | str, *, max_failures: int = 2) -> RestartPolicy:
    return RestartPolicy(
        FailureConfig(max_failures=max_failures), directory=str(run), max_wait_minutes=3.0, mailbox=None
    )


def test_a_restart_says_why_and_from_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(str(tmp_path), ["checkpoint-00000005", "checkpoint-00000010"])
    restarts = policy(tmp_path)
    decisions = [restarts.make_decision(group_error(_1=died(KILLED))) for _ in range(3)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RETRY, FailureDecision.RAISE]
    first, second = capsys.readouterr().out.splitlines()
    assert "worker 1: its process 2219" in first
    assert first.endswith("restart 1 of 2, from step 10")
    assert second.endswith("restart 2 of 2, from step 10")


def test_waiting_for_room_is_told_every_minute_and_has_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(ray_failures.time, "monotonic", lambda: now)
    no_room = ControllerError(WorkerGroupStartupTimeoutError(num_workers=2))
    restarts = policy(tmp_path)

    def wait() -> FailureDecision:
        nonlocal now
        now += 60.0
        return restarts.make_decision(no_room)

    assert [wait() for _ in range(3)] == [FailureDecision.RETRY, FailureDecision.RETRY, FailureDecision.RAISE]
    said = capsys.readouterr().out.splitlines()
    assert [re.findall(r"^no room for 2 workers, .* for (\d) minutes", line) for line in said] == [["1"], ["2"]]
    message = str(as_fatal(no_room, str(tmp_path), max_wait_minutes=3.0))
    assert "run.max_wait_minutes = 3" in message
    assert message.endswith("the same command then begins again at step 0")
    # Every wait has its own limit, and none of them is a restart.
    restarts = policy(tmp_path)
    assert [wait(), wait()] == [FailureDecision.RETRY] * 2
    assert restarts.make_decision(group_error(_1=died(NODE_LOST))) == FailureDecision.RETRY
    assert [wait(), wait(), wait()] == [FailureDecision.RETRY, FailureDecision.RETRY, FailureDecision.RAISE]


def test_whoever_writes_a_full_disk_is_told_with_the_path(small_disk: Callable[[int], Path]) -> None:
    full_disk = small_disk(1)
    tensors = {"weight": torch.zeros(1 << 20)}

    (full_disk.parent / "source").write_bytes(bytes(4 << 20))
    for writer in (
        lambda: SafeCheckpointEngine().save(tensors, str(full_disk / "file")),
        lambda: save_file(tensors, full_disk / "file"),
        lambda: (full_disk / "file").write_bytes(bytes(4 << 20)),
        lambda: pyarrow.fs.copy_files(str(full_disk.parent / "source"), str(full_disk / "file")),
    ):
        with pytest.raises(DiskFullError) as caught, naming_full_disk(full_disk / "file"):
            writer()
        error = deepcopy(caught.value)  # Pickle copies it in the same way when a worker sends it.
        assert (error.errno, error.filename) == (errno.ENOSPC, str(full_disk / "file"))
        assert str(error) == f"[Errno 28] No space left on device: '{full_disk / 'file'}'"
        (full_disk / "file").unlink(missing_ok=True)


def test_a_small_file_outlives_a_full_disk(small_disk: Callable[[int], Path]) -> None:
    full_disk = small_disk(1)
    uri = str(full_disk / "outcome.json")
    write_json(uri, {"step": 1})
    with pytest.raises(OSError, match=r"No space left on device: '.*outcome\.json'"):
        write_json(uri, {"step": "2" * (2 << 20)})
    assert read_json(uri) == {"step": 1}
    assert [file.name for file in full_disk.iterdir()] == ["outcome.json"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.ENOTDIR])
def test_a_full_disk_is_no_reason_to_start_again(
    tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DiskFullError) as caught, naming_full_disk("/runs/a/checkpoint-00000005"):
        raise OSError(number, "as pyarrow says it")
    full = caught.value
    remedy = "make room there" if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "see that it can be written"
    for error in (group_error(_0=RuntimeError("peer"), _1=full), ControllerError(full)):
        assert policy(tmp_path).make_decision(error) == FailureDecision.RAISE
        message = str(as_fatal(error, str(tmp_path), max_wait_minutes=1.0))
        assert message.startswith(f"{os.strerror(number)}: /runs/a/checkpoint-00000005. To continue, {remedy}")
    assert capsys.readouterr().out == ""
    other = group_error(_1=OSError(errno.EIO, "I/O error"))
    assert policy(tmp_path).make_decision(other) == FailureDecision.RETRY


def test_a_store_that_refuses_to_be_written_is_no_reason_to_start_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Resumption(checkpoints=["checkpoint-00000010"], notes=[])
    monkeypatch.setattr(resumption, "find_resumption", lambda *_: whole)
    aws = "When initiating multiple part upload for key 'a' in bucket 'b': AWS Error ACCESS_DENIED during PutObject"
    directory = "s3://b/runs/x"
    sent = deepcopy(explain_write(OSError(aws), f"{directory}/checkpoint"))  # as pickle copies what a worker sends
    for error in (group_error(_0=RuntimeError("peer"), _1=sent), ControllerError(OSError(aws))):
        assert policy(directory).make_decision(error) == FailureDecision.RAISE
        message = str(as_fatal(error, directory, max_wait_minutes=1.0))
        assert re.match(rf"{directory}\S*: the store refuses to write there: check that AWS_ACCESS_KEY_ID", message)
        assert message.endswith("the same command then goes on from the checkpoint of step 10, which is whole")
        assert "\n" not in message
    assert capsys.readouterr().out == ""
    slow = group_error(_0=OSError("AWS Error SLOW_DOWN"))
    assert policy(tmp_path).make_decision(slow) == FailureDecision.RETRY


Nodes = list[dict[str, float]]


def configure(num_workers: int | str, batch_size: int, micro_batch_size: int = 0) -> TrainingConfig:
    return TrainingConfig(
        run=RunSection(name="run"),
        optimizer=OptimizerSection(batch_size=batch_size, micro_batch_size=micro_batch_size),
        workers=WorkersSection(num_workers=num_workers),
    )


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), st.integers(0, 4))
def test_possible_numbers_divide_the_batch_and_the_micro_batch(
    first: int, second: int, factor: int, micro: int
) -> None:
    least, most = sorted((first, second))
    size = least * most * factor * max(1, micro)
    config = configure(f"{least}:{most}", size, micro)
    expected = [n for n in range(least, most + 1) if size % n == 0 and (not micro or size // n % micro == 0)]
    assert config.possible_num_workers == expected
    assert {least, most} <= set(expected)
    assert configure(most, size).possible_num_workers == [most]  # A fixed number is what it is.
    for number in expected:
        smaller = config.with_num_workers(number)
        assert smaller.micro_batch_size * smaller.num_accumulation_steps * number == size
    assert config.micro_batch_size == config.with_num_workers(most).micro_batch_size


@pytest.mark.parametrize("value", ["0:2", "3:2", "2:", "two", "1:2:3", 0])
def test_what_is_no_range_is_refused(value: int | str) -> None:
    with pytest.raises(ValueError, match=r"workers\.num_workers = "):
        WorkersSection(num_workers=value)


class Cluster:
    """Nodes, a clock, the last checkpoint and the mailbox that a policy sees, which a test changes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total: Nodes = []
        self.free: Nodes = []
        self.now, self.step, self.num_saves = 0.0, 5, 0
        self.said: list[str] = []
        monkeypatch.setattr(ray_train, "free_resources", lambda: dict(enumerate(self.free)))
        monkeypatch.setattr(ray_train, "answering_nodes", self.list_nodes)
        monkeypatch.setattr(ray_train.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(ray_train, "registered_step", lambda directory: self.step)
        monkeypatch.setattr(ElasticPolicy, "_maybe_send_resource_request", lambda policy: None)

    def list_nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": number, "Resources": resources} for number, resources in enumerate(self.total)]

    def ask_to_save(self) -> None:
        self.num_saves += 1

    @property
    def mailbox(self) -> Any:
        return SimpleNamespace(ask_to_save=self.ask_to_save, say=self.said.append)

    def make_policy(self, possible: list[int], cpus: float = 1.0, data_cpus: float = 0.0) -> ElasticPolicy:
        scaling = ScalingConfig(num_workers=possible[-1], resources_per_worker={"CPU": cpus})
        return ElasticPolicy(
            scaling, possible=possible, data_cpus=data_cpus, directory="runs/run", mailbox=self.mailbox
        )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def start(policy: ElasticPolicy) -> int | None:
    """Return the number of workers that the policy starts; None if it waits."""
    decision = policy.make_decision_for_non_running_worker_group()
    return decision.num_workers if isinstance(decision, ResizeDecision) else None


def look(policy: ElasticPolicy, running: int) -> int | None:
    """Return the number of workers that the policy changes a running group to; None if it leaves it."""
    decision = policy.make_decision_for_running_worker_group(SimpleNamespace(num_workers=running), None)
    assert isinstance(decision, ResizeDecision | NoopDecision)
    return decision.num_workers if isinstance(decision, ResizeDecision) else None


def test_a_run_starts_with_what_fits_and_tries_fewer_where_others_are(cluster: Cluster) -> None:
    cluster.total = [{"CPU": 4.0}, {"CPU": 2.0}]
    policy = cluster.make_policy([1, 2, 4, 8])
    # It does not fit what is there in the order 4, 2, 1; when all have failed, it begins again.
    assert [start(policy) for _ in range(5)] == [4, 2, 1, 4, 2]
    assert cluster.said[0] == "the cluster has room for 6 of 8 workers: the run goes on with 4"


def test_the_cpus_of_readers_are_left_free_and_fragments_are_not_counted(cluster: Cluster) -> None:
    cluster.total = [{"CPU": 4.0}]
    assert start(cluster.make_policy([1, 2, 3, 4], data_cpus=0.0)) == 4
    assert start(cluster.make_policy([1, 2, 3, 4], data_cpus=4.0)) == 2
    cluster.total = [{"CPU": 1.5}, {"CPU": 1.5}]
    assert start(cluster.make_policy([1, 2, 3], data_cpus=0.0)) == 2
    cluster.total = [{"CPU": 0.3}] * 2  # .1 is not exact in binary
    assert start(cluster.make_policy([1, 6], cpus=0.1)) == 6


def test_after_a_failure_the_table_of_nodes_settles_first(cluster: Cluster) -> None:
    cluster.total = [{"CPU": 1.0}, {"CPU": 1.0}]
    policy = cluster.make_policy([1, 2])
    assert start(policy) == 2
    assert look(policy, 2) is None
    assert start(policy) is None
    cluster.total.pop()
    cluster.now = 2.9
    assert start(policy) is None
    cluster.now = 3.1
    assert start(policy) == 1
    assert cluster.said == ["the cluster has room for 1 of 2 workers: the run goes on with 1"]


def test_a_run_grows_after_it_has_saved(cluster: Cluster) -> None:
    cluster.total = cluster.free = [{"CPU": 1.0}]
    policy = cluster.make_policy([1, 2, 4])
    assert start(policy) == 1
    cluster.free = [{"CPU": 0.0}]
    assert [look(policy, 1) for _ in range(3)] == [None] * 3
    cluster.total, cluster.free = [{"CPU": 1.0}, {"CPU": 2.0}], [{"CPU": 0.0}, {"CPU": 2.0}]
    assert [look(policy, 1) for _ in range(3)] == [None] * 3
    assert cluster.num_saves == 1
    cluster.step = 7
    assert look(policy, 1) == 2
    assert cluster.said[-1] == "the cluster has room for 2 workers: the run grows from 1, from step 7"
    # If the group cannot be started, because others were faster, fewer workers are tried.
    assert start(policy) == 1


def test_what_readers_leave_free_for_a_moment_is_no_room(cluster: Cluster) -> None:
    cluster.total, cluster.free = [{"CPU": 2.0}], [{"CPU": 1.0}]
    policy = cluster.make_policy([1, 2, 4], cpus=0.5, data_cpus=2.0)
    assert start(policy) == 2
    cluster.step += 1
    assert [look(policy, 2) for _ in range(2)] == [None, None]
    assert cluster.num_saves == 0


def test_resources_that_go_again_end_the_wish_to_grow(cluster: Cluster) -> None:
    cluster.total = [{"CPU": 2.0}]
    policy = cluster.make_policy([1, 2])
    cluster.free = [{"CPU": 1.0}]
    assert look(policy, 1) is None
    cluster.free = [{"CPU": 0.0}]
    cluster.step = 9
    assert look(policy, 1) is None
    cluster.free = [{"CPU": 1.0}]
    assert look(policy, 1) is None
    assert cluster.num_saves == 2


@pytest.mark.parametrize("change", [{"ray_version": "2.1", "current_report_index": "many"}, {}])
def test_ray_train_does_not_start_from_a_snapshot_of_another_version_or_without_a_checkpoint(
    tmp_path: Path, change: dict[str, str]
) -> None:
    def open_manager() -> CheckpointManager:
        storage = StorageContext(storage_path=str(tmp_path), experiment_dir_name="run")
        return CheckpointManager(CheckpointConfig(), storage)

    state = json.loads(open_manager()._save_state())
    gone = {"checkpoint_dir_name": "checkpoint-00000005", "metrics": {}}
    state |= {"checkpoint_results": [gone], "checkpoint_report_indices": [0], "latest_checkpoint_result": gone}
    (tmp_path / "run" / "checkpoint_manager_snapshot.json").write_text(json.dumps(state | change))
    with pytest.raises(CheckpointManagerInitializationError):
        open_manager()
    forget_snapshot(str(tmp_path / "run"))
    assert open_manager().latest_checkpoint_result is None
