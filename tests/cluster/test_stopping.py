"""Test that a job told to end by SIGTERM saves the step that it is at, and goes on from there."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killing import last_checkpoint
from language_model_support import assert_same_losses, options_of
from mlflow import MlflowClient
from support import run_until

from jobs.engine.launch import train
from jobs.engine.progress import PROGRESS_FILE
from jobs.engine.run_list import list_runs
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_sigterm_loses_no_step(
    cluster: dict[str, str],
    tiny: Callable[..., LanguageModelConfig],
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
