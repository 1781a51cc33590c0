"""Test that processes which open runs in one MLflow store at the same moment all get theirs."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from jobs.engine.tracking import open_run
from jobs.engine.tracking_store import find_or_create_experiment, log_data_sets

NUM_PROCESSES = 3
NUM_ROUNDS = 12
DATA = {"training": ("prose", "0123", "/data/prose"), "validation": ("prose", "4567", "/data/held-out")}


def run_together(work: Callable[[int, int], Any]) -> list[str]:
    """Call `work(process, round)` in several processes, which begin every round together, and return their errors."""
    # Forks, because a new process would first import MLflow for seconds.
    context = multiprocessing.get_context("fork")
    barrier, errors = context.Barrier(NUM_PROCESSES, timeout=120), context.Queue()

    def call(process: int) -> None:
        logging.disable(logging.CRITICAL)
        for number in range(NUM_ROUNDS):
            barrier.wait()
            try:
                work(process, number)
            except Exception as error:
                errors.put(f"{number}: {error!r}")
        errors.put("")

    processes = [context.Process(target=call, args=(process,), daemon=True) for process in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    said = []
    while said.count("") < NUM_PROCESSES:
        said.append(errors.get(timeout=120))
    for process in processes:
        process.join()
    return [error for error in said if error]


def test_the_first_runs_of_a_new_store_open_it_together(tmp_path: Path) -> None:
    def start(process: int, number: int) -> None:
        open_run(
            uri=f"sqlite:///{tmp_path}/{number}/mlflow.db", experiment="tests", name=f"run {process}",
            directory=f"/runs/{process}", parameters={"rho": 3.0}, tags={}, data_sets=DATA,
        )  # fmt: skip

    assert run_together(start) == []
    for number in range(NUM_ROUNDS):
        client = MlflowClient(f"sqlite:///{tmp_path}/{number}/mlflow.db")
        assert sorted(experiment.name for experiment in client.search_experiments()) == ["Default", "tests"]
        runs = client.search_runs(["1"])
        assert sorted(run.info.run_name for run in runs) == [f"run {process}" for process in range(NUM_PROCESSES)]
        assert [{item.dataset.digest for item in run.inputs.dataset_inputs} for run in runs] == [
            {"0123", "4567"}
        ] * NUM_PROCESSES


def test_an_experiment_and_a_data_set_are_made_once_by_processes_that_do_so_together(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    runs = [client.create_run("0").info.run_id for _ in range(NUM_PROCESSES)]

    def make(process: int, number: int) -> None:
        own = MlflowClient(uri)
        assert find_or_create_experiment(own, uri, f"experiment {number}") == str(number + 1)
        log_data_sets(own, runs[process], {"training": ("prose", f"{number:04}", "/data/prose")})

    assert run_together(make) == []
    for run in runs:
        inputs = client.get_run(run).inputs.dataset_inputs
        assert sorted(item.dataset.digest for item in inputs) == [f"{number:04}" for number in range(NUM_ROUNDS)]


def test_what_the_store_refuses_for_another_reason_is_an_error(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    with pytest.raises(MlflowException, match="experiment name"):
        find_or_create_experiment(client, uri, "")
    with pytest.raises(MlflowException, match="not found"):
        log_data_sets(client, "0" * 32, DATA)
