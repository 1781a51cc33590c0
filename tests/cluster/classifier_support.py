"""Configurations and MLflow runs of the cross-validation that `test_train_classifier.py` makes."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run
from support import readme_lines

from jobs.engine.command_line import parse_preset
from jobs.engine.metrics import TrackedRun, metric_history
from jobs.tasks.classifier.config import ClassifierConfig, CrossValidationConfig
from jobs.tasks.presets.classifiers import PRESETS
from pipelines.storage import read_json

NUM_STEPS = 12
SETTINGS = [
    "--data.num-examples", "0", "--grid.seeds", "2", "--grid.num-folds", "2", "--grid.no-with-baseline",
    "--grid.num-centers", "3", "--grid.keep-models", "--grid.num-concurrent", "1", "--run.num-steps", str(NUM_STEPS),
    "--run.checkpoint-every", "4", "--run.log-every", "4", "--run.max-restarts", "0", "--optimizer.batch-size", "8",
    # With a smaller epsilon, Adam would make full-sized steps of gradients that are only rounding errors.
    "--optimizer.epsilon", "1e-4", "--workers.precision", "fp32",
]  # fmt: skip


def arguments(downstream: Path, storage: Path) -> list[str]:
    """Return the arguments of the README's line, with the paths and settings of this test."""
    paths = {"senteval/data/downstream": str(downstream), ".venv/bin/python": sys.executable}
    (line,) = readme_lines(rf"{re.escape(sys.executable)} -m jobs\.train_classifier ", paths)
    shown = shlex.split(line.replace("--data.tasks TREC CR", "--data.tasks CR"))[3:]
    return [*shown, "--model.path", str(downstream / "encoder"), "--run.storage", str(storage), *SETTINGS]


def configuration(words: list[str]) -> CrossValidationConfig:
    config, _ = parse_preset(PRESETS, words, job="train_classifier", purpose="")
    return config


def at(cell: ClassifierConfig, storage: Path) -> ClassifierConfig:
    return replace(cell, run=replace(cell.run, storage=str(storage)))


def named(cell: ClassifierConfig, name: str) -> ClassifierConfig:
    return replace(cell, run=replace(cell.run, name=name))


def list_runs(uri: str) -> list[Run]:
    """Return MLflow's runs of the experiment."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("classifiers")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def history(cell: ClassifierConfig, key: str) -> dict[int, float]:
    outcome: Any = read_json(f"{cell.run.directory}/outcome.json")
    return metric_history(TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"]), key)
