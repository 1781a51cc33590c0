"""Test that a run whose controller lives but does not answer starts another one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import ray
from ray._private import state
from support import wait_for

from jobs.engine import controller_start, trainer
from jobs.engine.job import FatalTrainingError
from jobs.engine.launch import train
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan

pytestmark = pytest.mark.cluster


def test_the_first_call_is_made_when_the_controller_lives(
    cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver then asks for the state and is told that it lives, so it needs no message about a change."""

    class Controller:
        def __init__(self, seconds: float) -> None:
            time.sleep(seconds)

        async def get_state(self) -> int:
            return 1

    seen: list[str] = []
    wait = ray.wait

    def look_and_wait(references: list[Any], **options: Any) -> Any:
        seen.append(state.actors(controller._actor_id.hex())["State"])
        return wait(references, **options)

    monkeypatch.setattr(ray, "wait", look_and_wait)
    controller: Any = ray.remote(num_cpus=0)(Controller).remote(1.0)
    controller_start.wait_for_answer(controller, patience_seconds=30)
    assert seen == ["ALIVE"]
    ray.kill(controller)
    wait_for(lambda: state.actors(controller._actor_id.hex())["State"] == "DEAD")
    controller_start.wait_for_answer(controller, patience_seconds=30)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(controller.get_state.remote())


@pytest.mark.parametrize("num_silent", [1, pytest.param(controller_start.NUM_STARTS, marks=pytest.mark.long)])
def test_a_controller_that_does_not_answer_is_replaced(
    cluster: dict[str, str],
    tiny: Callable[..., LanguageModelConfig],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    num_silent: int,
) -> None:
    """The process of a silent controller is stopped by a signal; if all are silent, the run ends with one line.

    The controller may have started its cleaner by then, which ends after it.
    """
    stopped: list[int] = []

    def wait_for_answer(controller: Any) -> None:
        is_silent = len(stopped) < num_silent
        if is_silent:
            wait_for(lambda: state.actors(controller._actor_id.hex()).get("State") == "ALIVE")
            stopped.append(state.actors(controller._actor_id.hex())["Pid"])
            os.kill(stopped[-1], signal.SIGSTOP)
        controller_start.wait_for_answer(controller, patience_seconds=2 if is_silent else 60)

    monkeypatch.setattr(trainer, "wait_for_answer", wait_for_answer)
    plan = make_plan(tiny("silent", run={"num_steps": 2}))
    try:
        if num_silent == 1:
            assert train(plan)["num_steps"] == 2
        else:  # the commands print the message of this error and end with status 1
            with pytest.raises(FatalTrainingError, match="has not answered for 2 s"):
                train(plan)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):  # Ray has ended it
                os.kill(pid, signal.SIGKILL)
    replaced = "has not answered for 2 s; starting another one"
    assert capfd.readouterr().out.count(replaced) == min(num_silent, controller_start.NUM_STARTS - 1)
    wait_for(lambda: not count_cleaners())


def count_cleaners() -> int:
    actors = state.actors().values()
    return sum(actor["ActorClassName"] == "OwnClusterCleaner" and actor["State"] != "DEAD" for actor in actors)
