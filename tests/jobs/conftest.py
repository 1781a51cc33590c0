"""Provide what tests of several packages share: processes connected by gloo, an empty MLflow store, jobs that refuse."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from mlflow import MlflowClient

from tests.local_training import Call, processes


@pytest.fixture(scope="session")
def alone() -> Iterator[Call]:
    with processes(1) as call:
        yield call


@pytest.fixture(scope="session")
def together() -> Iterator[Call]:
    with processes(2) as call:
        yield call


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run the tests of a module as the only worker of a process group."""
    if dist.is_initialized():
        yield
        return
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the tables of an MLflow database once, which takes seconds."""
    file = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def mlflow_uri(empty_store: Path, tmp_path: Path) -> str:
    """Return the URI of an MLflow database without runs."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a job which must refuse with status 2, and returns the one line that it prints."""

    def run(job: str, *arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"jobs.{job}").main([*map(str, arguments)])
        *progress, last = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2
        assert last.startswith("error: ")
        assert not [line for line in progress if line and not line.startswith("Loading weights")]
        return last

    return run
