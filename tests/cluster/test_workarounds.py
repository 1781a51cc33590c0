"""Test what is done about faults of Ray: the cleaner of a run, its silent controller, the first call of an actor."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray._private import state
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group, placement_group_table
from support import wait_for

from jobs.engine.console import Console
from jobs.engine.ray_private import OwnClusterCleaner
from jobs.studies.sweeps.rounds import start_race
from jobs.studies.sweeps.stopping import Halving
from jobs.studies.trials.trial_start import calling_trials_that_live

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_a_cleaner_that_is_told_of_another_cluster_leaves_a_healthy_run_alone_and_frees_a_lost_one(
    cluster: dict[str, str],
) -> None:
    """The run is a controller that does nothing, and one reserved CPU."""

    class Controller:
        def answer(self) -> bool:
            return True

    controller: Any = ray.remote(num_cpus=0)(Controller).remote()
    reserved = placement_group([{"CPU": 1}])
    ray.get([controller.answer.remote(), reserved.ready()])
    # Ray's state API would ask the cluster of this address, as it does once another Ray was started on the machine.
    options: dict[str, Any] = {"lifetime": "detached", "runtime_env": {"env_vars": {"RAY_ADDRESS": "127.0.0.1:1"}}}
    settings = {"check_interval_s": 0.1, "get_actor_timeout_s": 5, "stop_timeout": 10.0}
    cleaner: Any = (
        ray.remote(num_cpus=0)(OwnClusterCleaner)
        .options(**options)
        .remote(controller_actor_id=controller._actor_id.hex(), **settings)
    )
    ray.get([cleaner.register_placement_group.remote(reserved), cleaner.start_monitoring.remote()])

    def lives() -> tuple[bool, bool]:
        """Return whether the cleaner lives, and whether the CPU is reserved."""
        has_cleaner = state.actors(cleaner._actor_id.hex())["State"] != "DEAD"
        return has_cleaner, placement_group_table(reserved)["state"] == "CREATED"

    with suppress(TimeoutError):
        wait_for(lambda: lives() != (True, True), seconds=2)
    assert lives() == (True, True)
    ray.kill(controller)
    wait_for(lambda: lives() == (False, False))


@pytest.fixture
def first_calls(cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Return name of an actor's class → the states of such actors by Ray's table when this process called them first."""
    states: dict[str, set[str]] = {}
    known: set[str] = set()
    call = ActorHandle._actor_method_call

    def look_and_call(actor: Any, method: str, *arguments: Any, **options: Any) -> Any:
        identifier = actor._actor_id.hex()
        if identifier not in known:
            known.add(identifier)
            name = actor._ray_actor_creation_function_descriptor.class_name
            states.setdefault(name, set()).add(str(state.actors(identifier).get("State")))
        return call(actor, method, *arguments, **options)

    monkeypatch.setattr(ActorHandle, "_actor_method_call", look_and_call)
    return states


def test_no_actor_is_called_before_it_lives(
    first_calls: dict[str, set[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    race = start_race(Halving, 10, (0.1, 0.2))
    assert ray.get(race.goes_on.remote("trial", []))

    @ray.remote(num_cpus=0)
    def speak(mailbox: Any) -> None:
        ray.get(mailbox.say.remote("a line of a worker"))

    with Console(1) as console:
        ray.get(speak.remote(console.mailbox))
        time.sleep(1.5)
    assert "a line of a worker" in capsys.readouterr().out
    assert first_calls == {name: {"ALIVE"} for name in ("Halving", "_Mailbox")}

    def run_trial(config: dict[str, int]) -> dict[str, int]:
        return {"square": config["x"] ** 2}

    for waits in (True, False):
        first_calls.clear()
        tuner = tune.Tuner(
            tune.with_resources(run_trial, {"CPU": 0.1}),
            param_space={"x": tune.grid_search([1, 2])},
            run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
        )
        with calling_trials_that_live() if waits else nullcontext():
            results = tuner.fit()
        assert sorted(result.metrics["square"] for result in results if result.metrics) == [1, 4]
        (states,) = first_calls.values()
        assert (states == {"ALIVE"}) == waits  # what Tune does by itself is shown, so that this says if it changes
