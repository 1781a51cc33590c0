"""Test that a run survives a full disk, damaged files, workers that die and SIGTERM, and waits for machines to an end."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from killing import at_the_same_time, kill_workers, last_checkpoint
from language_model_support import assert_same_losses, options_of
from mlflow import MlflowClient
from support import run_until, training_worker_pids, wait_for

from jobs.engine.console import PROGRESS_FILE
from jobs.engine.failures import FatalTrainingError
from jobs.engine.launch import train
from jobs.engine.resumption import RECORD_FILE
from jobs.engine.run_list import list_runs
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan

pytestmark = [pytest.mark.cluster, pytest.mark.long]

Make = Callable[..., LanguageModelConfig]


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def test_a_full_disk_ends_the_run_which_goes_on_from_the_checkpoint_that_is_whole_through_a_kill(
    cluster: dict[str, str], tiny: Make, small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray Train's snapshot is cut, and a byte of the newest checkpoint changes, while there is no run."""
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
        wait_for(lambda: last_checkpoint(run) >= 10)
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

    damaged = next((run / f"checkpoint-{step:08d}").glob("deepspeed/*_states.pt"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (run / RECORD_FILE).write_text((run / RECORD_FILE).read_text()[:50])
    killed: list[int] = []

    def kill_a_worker() -> None:
        wait_for(lambda: bool(training_worker_pids(cluster)))
        wait_for(lambda: last_checkpoint(run) > step)
        killed.extend(kill_workers(cluster))

    with at_the_same_time(kill_a_worker):
        outcome = train(make_plan(config))
    said = capsys.readouterr().out
    assert f"{RECORD_FILE} is damaged: the checkpoints' own directories decide; going on from step {step}\n" in said
    refusal = (
        rf"checkpoint-{step:08d} cannot be used: deepspeed/{damaged.name} does not hold what was written; .*going on"
    )
    (before,) = map(int, re.findall(rf"{refusal} from step (\d+)\n", said))
    assert 0 < before < step
    assert f"continuing after step {before}\n" in said
    assert f"worker 0: its process {killed[0]} on " in said
    assert "died: killed by a signal, such as 9" in said
    assert f"; restart 1 of 3, from step {outcome['resumed_from_step']}\n" in said
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


def test_sigterm_loses_no_step(
    cluster: dict[str, str],
    tiny: Make,
    reference: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny("told-to-end", run={"checkpoint_every": 1000, "log_every": 1})
    run = Path(config.run.directory)
    environment = {name: value for name, value in cluster.items() if name != "RAY_ADDRESS"}
    status, said = run_until(
        (run / PROGRESS_FILE).exists,
        "jobs.train_lm",
        ["gpt2-scratch", *options_of(config)],
        environment,
        by=signal.SIGTERM,
    )
    assert status == 130, said
    assert "the same command goes on" in said
    (client,) = [MlflowClient(f"sqlite:///{config.run.resolved_storage}/mlflow.db")]
    assert [found.info.status for found in client.search_runs(["1"])] == ["KILLED"]
    # No checkpoint was due, but there is one, of the last step that was noted.
    step = last_checkpoint(run)
    assert step == json.loads((run / PROGRESS_FILE).read_text())["step"] > 0
    (listed,) = (one for one in list_runs(config.run.storage) if one.name == "told-to-end")
    assert (listed.state, listed.step) == ("interrupted", step)
    outcome = train(make_plan(config))
    assert outcome["resumed_from_step"] == step
    assert f"before this start: step {step} of 40" in capsys.readouterr().out
    assert_same_losses(outcome, reference)
