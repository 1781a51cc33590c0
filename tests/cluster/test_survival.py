"""Test that a run ends well on a full disk, goes on from what is whole, and waits for machines to an end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from support import at_the_same_time, last_checkpoint, tiny_config, wait_for

from jobs.engine.launch import train
from jobs.engine.resumption import RECORD_FILE, FatalTrainingError
from jobs.tasks.language_model.plan import make_plan

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def test_a_full_disk_ends_the_run_which_goes_on_from_the_checkpoint_that_is_whole(
    cluster: dict[str, str],
    corpus: Path,
    tmp_path: Path,
    small_disk: Callable[[int], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ray Train's snapshot is cut, and a byte of the newest checkpoint changes, while there is no run."""
    disk = small_disk(64)
    # With `num_threads = 0`, a run has one thread here if it shares the cores with others, and all cores if alone.
    config = tiny_config(
        corpus,
        disk,
        "full",
        run={"max_restarts": 3, "num_steps": 80},
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
    outcome = train(make_plan(config))
    said = capsys.readouterr().out
    assert f"{RECORD_FILE} is damaged: the checkpoints' own directories decide; going on from step {step}\n" in said
    refusal = (
        rf"checkpoint-{step:08d} cannot be used: deepspeed/{damaged.name} does not hold what was written; .*going on"
    )
    (before,) = map(int, re.findall(rf"{refusal} from step (\d+)\n", said))
    assert 0 < before < step
    assert outcome["resumed_from_step"] == before
    # The continued run has as many threads as at its first start.
    assert json.loads((run / "checkpoint-00000080" / "state.json").read_text())["num_threads"] == 1


def test_waiting_for_machines_says_so_and_ends(
    cluster: dict[str, str],
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "2")
    sections = {"run": {"max_wait_minutes": 0.1}, "workers": {"cpus_per_worker": 1.5}, "tracking": {"enabled": False}}
    config = tiny_config(corpus, tmp_path / "runs", "waiting", **sections)
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
