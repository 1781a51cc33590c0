"""Test that the driver calls no actor before Ray's table has it as alive (see `pipelines.actor_start`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray._private import state
from ray.actor import ActorHandle

from jobs.engine.console import Console, Progress
from jobs.scoring.config import PoolSection
from jobs.scoring.stages import Stages, run_stages
from jobs.studies.sweeps.rounds import start_race
from jobs.studies.sweeps.stopping import Halving
from jobs.studies.trials.trial_start import calling_trials_that_live
from pipelines.actor_start import has_started, wait_until_started
from pipelines.text.growing import GrowingManifest, load_or_grow
from pipelines.text.packing import PackingConfig
from pipelines.text.part_preparer import GrowingSettings
from pipelines.text.prepare import PrepareConfig
from pipelines.text.tokenization import load_tokenizer

pytestmark = pytest.mark.cluster


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


def test_an_actor_whose_constructor_fails_is_not_waited_for(cluster: dict[str, str]) -> None:
    """The next call of it raises Ray's error."""

    class Broken:
        def __init__(self) -> None:
            raise ArithmeticError("broken")

        def answer(self) -> None: ...

    actor: Any = ray.remote(num_cpus=0)(Broken).remote()
    wait_until_started(actor)
    assert has_started(actor)
    with pytest.raises(ray.exceptions.ActorDiedError, match="broken"):
        ray.get(actor.answer.remote())


def test_a_pool_is_called_when_it_is_alive(first_calls: dict[str, set[str]]) -> None:
    def model() -> Callable[[int], int]:
        time.sleep(0.5)
        return abs

    kept: list[int] = []
    failed = run_stages(
        Stages(model=model),
        [-1, -2, -3],
        PoolSection(num_workers=2, cpus_per_worker=0.5),
        title=str,
        keep=lambda unit, value, seconds: kept.append(value),
    )
    assert not failed
    assert sorted(kept) == [1, 2, 3]
    assert first_calls == {"Worker": {"ALIVE"}}


def test_the_preparer_of_text_is_called_when_it_is_alive(
    first_calls: dict[str, set[str]], corpus: Path, tmp_path: Path
) -> None:
    config = PrepareConfig(source=str(corpus / "train"), tokenizer=str(corpus / "tokenizer"))
    layout = PackingConfig.for_tokenizer(load_tokenizer(config.tokenizer), 32)
    manifest = load_or_grow(config, layout, str(tmp_path), GrowingSettings(seed=1, num_cpus=0.5))
    assert isinstance(manifest, GrowingManifest)
    assert manifest.plan(seed=1, window_size=8).part(0)
    assert first_calls == {"PartPreparer": {"ALIVE"}}


def test_the_mailbox_is_called_when_it_is_alive(
    first_calls: dict[str, set[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker, which calls it from a process of its own, makes its first call much later."""

    @ray.remote(num_cpus=0)
    def speak(mailbox: Any, directory: str) -> None:
        progress = Progress(mailbox, num_steps=1, first_step=0, unit="tokens", with_lines=True, directory=directory)
        progress.say("a line of a worker")

    with Console(1) as console:
        ray.get(speak.remote(console.mailbox, str(tmp_path)))
        time.sleep(1.5)
    assert "a line of a worker" in capsys.readouterr().out
    assert first_calls == {"_Mailbox": {"ALIVE"}}


@pytest.mark.parametrize("waits", [True, False])
def test_the_actor_of_a_trial_is_called_when_it_is_alive(
    first_calls: dict[str, set[str]], tmp_path: Path, waits: bool
) -> None:
    def run_trial(config: dict[str, int]) -> dict[str, int]:
        return {"square": config["x"] ** 2}

    tuner = tune.Tuner(
        tune.with_resources(run_trial, {"CPU": 0.1}),
        param_space={"x": tune.grid_search([1, 2, 3])},
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    with calling_trials_that_live() if waits else nullcontext():
        results = tuner.fit()
    assert sorted(result.metrics["square"] for result in results if result.metrics) == [1, 4, 9]
    # What Tune does by itself is shown, so that this test says if that changes.
    (states,) = first_calls.values()
    assert (states == {"ALIVE"}) == waits


def test_the_race_of_a_sweep_is_called_when_it_is_alive(first_calls: dict[str, set[str]]) -> None:
    race = start_race(Halving, 10, (0.1, 0.2))
    assert ray.get(race.goes_on.remote("trial", []))
    assert first_calls == {"Halving": {"ALIVE"}}
