"""Test that a run whose number of workers may change shrinks and grows with the cluster, and trains as if it had not."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from killing import at_the_same_time, last_checkpoint
from language_model_support import Make, history
from node_support import second_node
from support import wait_for

from jobs.engine.launch import train
from jobs.tasks.language_model.plan import make_plan

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def num_writers(run: Path) -> int:
    """Return how many workers wrote the last checkpoint of a run; 0 if there is none, or it is being replaced."""
    with suppress(FileNotFoundError):
        state = json.loads((run / f"checkpoint-{last_checkpoint(run):08d}" / "state.json").read_text())
        return int(state["world_size"])
    return 0


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_shrinks_with_the_cluster_and_grows_with_it(
    cluster: dict[str, str],
    tiny: Make,
    capsys: pytest.CaptureFixture[str],
    stage: int,
) -> None:
    """One worker and its readers fill a node. A node is lost in mid-run, and another one comes later."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"num_steps": 400, "log_every": 20, "checkpoint_every": 5, "max_restarts": 3},
        "validation": {"every": 200},
    }
    fixed = {"num_workers": 1, "zero_stage": stage}
    undisturbed = train(make_plan(tiny("undisturbed", **sections, workers=fixed)))
    elastic = fixed | {"num_workers": "1:2", "cpus_per_worker": 3.0}
    plan = make_plan(tiny("elastic", **sections, workers=elastic))
    run = Path(plan.config.run.directory)
    capsys.readouterr()

    def disturb() -> None:
        wait_for(lambda: num_writers(run) == 2)
        lost.kill()
        wait_for(lambda: num_writers(run) == 1)
        with second_node(cluster):
            wait_for((run / "outcome.json").exists)

    with second_node(cluster) as lost, at_the_same_time(disturb):
        outcome = train(plan)
    said = capsys.readouterr().out
    assert "the cluster has room for 1 of 2 workers: the run goes on with 1" in said
    assert "the cluster has room for 2 workers: the run grows from 1, from step " in said
    assert outcome["world_size"] == 2
    losses, expected = history(outcome, "train/loss"), history(undisturbed, "train/loss")
    assert sorted(losses) == sorted(expected) == list(range(1, 401))
    for step, loss in expected.items():
        assert losses[step] == pytest.approx(loss, abs=1e-5), step
    assert history(outcome, "train/batch_digest") == history(undisturbed, "train/batch_digest")
