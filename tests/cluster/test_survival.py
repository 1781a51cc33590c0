"""Test that a run survives damaged checkpoints, a full disk, workers that die and nodes that are lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from killing import at_the_same_time, kill_workers, last_checkpoint
from support import training_worker_pids, wait_for

from jobs.engine.checkpoint_files import find_changed_file, find_damage
from jobs.engine.job import FatalTrainingError
from jobs.engine.launch import train
from jobs.engine.metrics import metric_history
from jobs.engine.resumption import SNAPSHOT_FILE
from jobs.engine.tracking import TrackedRun
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan

pytestmark = [pytest.mark.cluster, pytest.mark.long]

Make = Callable[..., LanguageModelConfig]


def losses(outcome: dict[str, Any]) -> dict[int, float]:
    return metric_history(TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"]), "train/loss")


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(
    cluster: dict[str, str], tiny: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny("damaged", run={"num_steps": 20})
    run = Path(config.run.directory)
    first = train(make_plan(config))
    expected = losses(first)
    assert sorted(expected) == list(range(1, 21))
    newest = run / "checkpoint-00000020"
    assert find_damage(str(newest)) == ""
    lists = [json.loads((newest / f"files-0000{rank}.json").read_text()) for rank in (0, 1)]
    assert lists[0]["group"] == lists[1]["group"] != ""
    assert not any(find_changed_file(newest, rank=rank, world_size=2) for rank in (0, 1))

    # Change one byte, which only a reader of the whole file notices, and cut the snapshot in the middle.
    damaged = next(newest.glob("deepspeed/*rank_1_*"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (run / SNAPSHOT_FILE).write_text((run / SNAPSHOT_FILE).read_text()[:50])
    (run / "outcome.json").unlink()
    capsys.readouterr()
    again = train(make_plan(config))
    said = capsys.readouterr().out
    assert f"{SNAPSHOT_FILE} is damaged: the checkpoints' own directories decide; going on from step 20" in said
    assert f"checkpoint-00000020 cannot be used: deepspeed/{damaged.name} does not hold what was written; " in said
    assert "going on from step 15\n" in said
    assert again["resumed_from_step"] == 15
    assert losses(again) == pytest.approx(expected, abs=1e-6)
    assert again["validation"] == pytest.approx(first["validation"], abs=1e-6, nan_ok=True)
    assert not any(find_changed_file(newest, rank=rank, world_size=2) for rank in (0, 1))

    # If no checkpoint is usable, the job stops before it starts any workers, and leaves everything as it is.
    for checkpoint in run.glob("checkpoint-*"):
        if checkpoint.is_dir():
            (checkpoint / "state.json").unlink()
    (run / "outcome.json").unlink()
    with pytest.raises(ValueError, match=r"00000015 cannot be used: state.json is missing. checkpoint-00000020 cannot"):
        train(make_plan(config))
    assert not (run / "lease.json").exists()


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def test_a_full_disk_ends_the_run_with_one_line_and_a_killed_worker_says_so(
    cluster: dict[str, str], tiny: Make, small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    disk = small_disk(64)
    # With `num_threads = 0`, a run has one thread here if it shares the cores with others, and all cores if alone.
    config = tiny(
        "full",
        run={"storage": str(disk), "max_restarts": 3, "num_steps": 80},
        workers={"num_workers": 1, "num_threads": 0},
        tracking={"enabled": False},
    )
    run = Path(config.run.directory)

    def fill_the_disk() -> None:
        wait_for((run / SNAPSHOT_FILE).exists)
        fill(disk)

    with at_the_same_time(fill_the_disk), pytest.raises(FatalTrainingError) as caught:
        train(make_plan(config), shares_cores=True)
    message = str(caught.value)
    assert message.startswith(f"No space left on device: {run}"), message
    assert "make room there: the same command then goes on from the checkpoint of step " in message
    assert "\n" not in message
    assert "restart" not in capsys.readouterr().out
    step = int(message.split("checkpoint of step ")[1].split(",")[0])
    (disk / "filler").unlink()
    killed: list[int] = []

    def kill_a_worker() -> None:
        # The full disk may have left files of later checkpoints, so only checkpoints that are noted from now on count.
        wait_for(lambda: bool(training_worker_pids(cluster)))
        noted = last_checkpoint(run)
        wait_for(lambda: last_checkpoint(run) > noted)
        killed.extend(kill_workers(cluster))

    with at_the_same_time(kill_a_worker):
        outcome = train(make_plan(config))
    said = capsys.readouterr().out
    assert f"worker 0: its process {killed[0]} on " in said
    assert "died: killed by a signal, such as 9" in said
    assert f"; restart 1 of 3, from step {outcome['resumed_from_step']}\n" in said
    assert f"continuing after step {step}\n" in said
    assert step <= outcome["resumed_from_step"] < 80
    # The continued run has as many threads as at its first start.
    assert json.loads((run / "checkpoint-00000080" / "state.json").read_text())["num_threads"] == 1


def test_waiting_for_machines_says_so_and_ends(
    cluster: dict[str, str], tiny: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "2")
    config = tiny(
        "waiting", run={"max_wait_minutes": 0.1}, workers={"cpus_per_worker": 1.5}, tracking={"enabled": False}
    )
    make_plan(config).prepare()

    @ray.remote(num_cpus=2)
    class Neighbour:
        def is_there(self) -> bool:
            return True

    neighbour = Neighbour.remote()
    ray.get(neighbour.is_there.remote())
    try:
        with pytest.raises(FatalTrainingError, match=r"no room for 2 workers, .*within run.max_wait_minutes = 0\.1"):
            train(make_plan(config))
    finally:
        ray.kill(neighbour)
    assert capsys.readouterr().out.count("no room for 2 workers, as nodes are lost or busy, for 0.0") >= 2
