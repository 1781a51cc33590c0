"""Train and submit tiny language models for tests, and compare what MLflow shows of their runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from readme_support import lines_like

from jobs.engine.identity import flatten
from jobs.engine.launch import train as run_plan
from jobs.engine.metrics import TrackedRun, metric_history
from jobs.scoring.mlflow_models import record_models
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan
from jobs.tasks.presets.language_models import PRESETS

Make = Callable[..., LanguageModelConfig]


def train(config: LanguageModelConfig) -> dict[str, Any]:
    return run_plan(make_plan(config), record_models=record_models)


def history(outcome: dict[str, Any], key: str) -> dict[int, float]:
    return metric_history(TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"]), key)


def models_of(outcome: dict[str, Any]) -> dict[str, LoggedModel]:
    """Return name → model for the models that MLflow shows under a run."""
    client = MlflowClient(outcome["tracking_uri"])
    experiment = client.get_run(outcome["mlflow_run_id"]).info.experiment_id
    models = client.search_logged_models([experiment])
    return {model.name: model for model in models if model.source_run_id == outcome["mlflow_run_id"]}


def has_checkpoint(run: Path) -> bool:
    """Return whether the first checkpoint is noted, whose files appear a little earlier."""
    record = run / "checkpoints.json"
    return record.exists() and "checkpoint-00000005" in record.read_text()


def assert_same_losses(outcome: dict[str, Any], reference: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Assert that every step, before and after the kill, has the batch and the loss of the uninterrupted run."""
    losses, expected = history(outcome, "train/loss"), history(reference, "train/loss")
    assert sorted(losses) == sorted(expected)
    for step in expected:
        assert losses[step] == pytest.approx(expected[step], abs=tolerance), step
    assert outcome["batches_digest"] == reference["batches_digest"]
    assert outcome["validation"]["cross_entropy_tau"] == pytest.approx(
        reference["validation"]["cross_entropy_tau"], abs=tolerance
    )
    assert outcome["num_tokens"] == reference["num_tokens"]


def options_of(config: LanguageModelConfig) -> list[str]:
    """Return the options that turn the preset `gpt2-scratch` into this configuration."""
    options = []
    preset = flatten(PRESETS["gpt2-scratch"]())
    for name, value in flatten(config).items():
        section, _, field = name.replace("_", "-").partition(".")
        if value == preset[name]:
            continue
        if isinstance(value, bool):
            options.append(f"--{section}.{field}" if value else f"--{section}.no-{field}")
        else:
            options.append(f"--{section}.{field}={value}")
    return options


def submitted(config: LanguageModelConfig) -> tuple[str, list[str]]:
    """Return the README's `ray job submit … -- … python …` for a configuration as (before `python`, arguments)."""
    (line,) = lines_like("ray job submit *")
    submit, _, arguments = line.partition(" python ")
    paths = {
        "s3://bucket/openwebtext2/train": config.data.train,
        "s3://bucket/openwebtext2/validation": config.data.validation,
        "s3://bucket/runs": config.run.storage,
        "http://mlflow:5000": f"sqlite:///{config.run.storage}/mlflow.db",
    }
    words = [paths.get(word, word) for word in shlex.split(arguments)]
    return submit, [*words, *(option for option in options_of(config) if option.partition("=")[0] not in words)]
