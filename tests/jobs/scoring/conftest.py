"""Fixtures of the tests of scoring: tiny models, saved once for each file of tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation_support import BruteForce, make_export, write_lines
from prediction_support import save_tiny_model, some_texts

from tests.jobs.scoring.generation_support import make_model


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    """Return an export whose TempNet reads logits, or what the test module asks for (indirectly)."""
    return make_export(tmp_path_factory.mktemp("export"), reads=getattr(request, "param", "logits"))


@pytest.fixture(scope="module")
def brute(export: str) -> BruteForce:
    return BruteForce(export)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return a tiny model with a TempNet, with a bias in its output layer if the test asks for it (indirectly)."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), with_bias=getattr(request, "param", False))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a text of twelve documents for that model."""
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    return Path(write_lines(path, [{"text": text} for text in some_texts(12)]))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("gpt2"), "gpt2", 64)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama", 2600)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("chat"), "llama", 400, tempnet=False, chat=True)


@pytest.fixture(scope="session")
def tracking_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of one database of MLflow for all tests, since making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"
