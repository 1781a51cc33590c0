"""Test that runs whose number of workers may change shrink and grow with the cluster, and train as if they had not."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_training_support import tiny_clip_config, write_smooth_tower
from killing import at_the_same_time, last_checkpoint
from language_model_support import history
from node_support import second_node
from sample_state_support import sample_states
from support import tiny_config, wait_for

from jobs.engine.launch import train
from jobs.engine.task import Plan
from jobs.tasks.dual_encoder.plan import make_plan as plan_clip
from jobs.tasks.language_model.plan import make_plan as plan_language_model

pytestmark = [pytest.mark.cluster, pytest.mark.long]

NUM_STEPS = 400
SMALLEST_TAU = 0.1

MakePlan = Callable[[str, int, dict[str, Any]], Plan]
"""`make(name, checkpoint_every, workers)`."""


def sections(checkpoint_every: int, workers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the configurations of all tasks have in common."""
    run = {"num_steps": NUM_STEPS, "log_every": 20, "checkpoint_every": checkpoint_every, "max_restarts": 3}
    return {"run": run, "validation": {"every": 200}, "workers": workers}


def language_model(fixture: Callable[[str], Path], storage: Path) -> MakePlan:
    def make(name: str, checkpoint_every: int, workers: dict[str, Any]) -> Plan:
        return plan_language_model(tiny_config(fixture("corpus"), storage, name, **sections(checkpoint_every, workers)))

    return make


def images_with_captions(fixture: Callable[[str], Path], storage: Path) -> MakePlan:
    tower = write_smooth_tower(storage.parent / "smooth")
    # Another number of workers adds up gradients in another order. Training with high learning rates or low temperatures
    # multiplies such rounding errors, also between two runs with a fixed number of workers; with these it does not.
    optimizer = {"learning_rate_base": 1e-4, "learning_rate_tempnet": 3e-4, "epsilon": 1e-4}
    tau = {"target_tau": None, "tau": 0.2, "tau_step": 1e-3, "tau_min": SMALLEST_TAU, "tau_max": 0.5}
    own = {"optimizer": optimizer, "model": {"image_path": tower}, "temperature": {"loss": "isogclr", **tau}}

    def make(name: str, checkpoint_every: int, workers: dict[str, Any]) -> Plan:
        changes = sections(checkpoint_every, workers) | own
        return plan_clip(tiny_clip_config(fixture("images"), storage, name, **changes))

    return make


def num_writers(run: Path) -> int:
    """Return how many workers wrote the last checkpoint of a run; 0 if there is none, or it is being replaced."""
    with suppress(FileNotFoundError):
        state = json.loads((run / f"checkpoint-{last_checkpoint(run):08d}" / "state.json").read_text())
        return int(state["world_size"])
    return 0


def train_through_loss_and_gain_of_a_node(plan: Plan, cluster: dict[str, str]) -> dict[str, Any]:
    """Train a run that begins on two nodes: one of them is lost in mid-run, and another one comes later."""
    run = Path(plan.config.run.directory)

    def disturb() -> None:
        wait_for(lambda: num_writers(run) == 2)
        lost.kill()
        wait_for(lambda: num_writers(run) == 1)
        with second_node(cluster):
            wait_for((run / "outcome.json").exists)

    with second_node(cluster) as lost, at_the_same_time(disturb):
        return train(plan)


def assert_same_training(outcome: dict[str, Any], undisturbed: dict[str, Any], columns: set[str]) -> None:
    """Assert that every step had the same samples and the same loss, and every sample ended with the same state."""
    assert outcome["batches_digest"] == undisturbed["batches_digest"]
    losses, expected = history(outcome, "train/loss"), history(undisturbed, "train/loss")
    assert sorted(losses) == sorted(expected) == list(range(1, NUM_STEPS + 1))
    for step, loss in expected.items():
        assert losses[step] == pytest.approx(loss, abs=1e-5), step
    states, wanted = sample_states(outcome, NUM_STEPS), sample_states(undisturbed, NUM_STEPS)
    assert states.keys() == wanted.keys() == columns
    for name, values in wanted.items():
        assert torch.isfinite(values).all()  # Every sample was visited many times.
        torch.testing.assert_close(states[name], values, rtol=0, atol=1e-5 / SMALLEST_TAU, msg=name)


@pytest.mark.parametrize(
    ("task", "workers", "columns"),
    [
        pytest.param(language_model, {"zero_stage": 3}, set(), id="zero-3"),
        pytest.param(images_with_captions, {}, {"log_u", "tau", "momentum"}, id="images"),
    ],
)
def test_a_run_shrinks_with_the_cluster_and_grows_with_it(
    cluster: dict[str, str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    task: Callable[[Callable[[str], Path], Path], MakePlan],
    workers: dict[str, Any],
    columns: set[str],
) -> None:
    """One worker and its readers fill a node. The language model must train as under the preset's ZeRO 2 on one worker."""
    make_plan = task(request.getfixturevalue, tmp_path / "runs")
    undisturbed = train(make_plan("undisturbed", NUM_STEPS, {"num_workers": 1}))
    capsys.readouterr()
    outcome = train_through_loss_and_gain_of_a_node(
        make_plan("elastic", 5, workers | {"num_workers": "1:2", "cpus_per_worker": 3.0}), cluster
    )
    said = capsys.readouterr().out
    assert "the cluster has room for 1 of 2 workers: the run goes on with 1" in said
    assert "the cluster has room for 2 workers: the run grows from 1, from step " in said
    assert outcome["world_size"] == 2
    assert_same_training(outcome, undisturbed, columns)
