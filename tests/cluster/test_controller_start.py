"""Test that a run whose controller lives but does not answer starts another one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from ray._private import state
from support import wait_for

from jobs.engine import controller_start, trainer
from jobs.engine.launch import train
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan

pytestmark = pytest.mark.cluster


def test_a_controller_that_does_not_answer_is_replaced(
    cluster: dict[str, str],
    tiny: Callable[..., LanguageModelConfig],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The process of the first controller is stopped by a signal as soon as Ray's table has it as alive."""
    stopped: list[int] = []

    def wait_for_answer(controller: Any) -> None:
        is_first = not stopped
        if is_first:
            wait_for(lambda: state.actors(controller._actor_id.hex()).get("State") == "ALIVE")
            stopped.append(state.actors(controller._actor_id.hex())["Pid"])
            os.kill(stopped[0], signal.SIGSTOP)
        controller_start.wait_for_answer(controller, patience_seconds=2 if is_first else 60)

    monkeypatch.setattr(trainer, "wait_for_answer", wait_for_answer)
    config = tiny("silent", run={"num_steps": 2})
    try:
        assert train(make_plan(config))["num_steps"] == 2
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):  # Ray has ended it
                os.kill(pid, signal.SIGKILL)
    assert "has not answered for 2 s; starting another one" in capfd.readouterr().out
