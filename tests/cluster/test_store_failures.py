"""Test a whole training run whose object store fails again and again, beside the same run on local files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from language_model_support import assert_same_losses
from s3_support import run_object_store
from support import LANGUAGE_MODEL_OPTIONS, ROOT

from pipelines.retries import count_all, count_by_reason
from pipelines.storage import read_json

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def train(name: str, home: Path, places: dict[str, str], environment: dict[str, str]) -> str:
    """Train `gpt2-scratch-small` with a Ray of its own, and return what it printed."""
    options = [
        *LANGUAGE_MODEL_OPTIONS, "--workers.num-workers=1", "--workers.zero-stage=0", f"--run.name={name}",
        f"--run.storage={home}", f"--tracking.uri=sqlite:///{home}/mlflow.db",
        *(f"--{field}={place}" for field, place in places.items()),
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "jobs.train_lm", "gpt2-scratch-small", *options],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_store_that_fails_costs_time_and_is_counted(corpus: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    local = {"data.train": f"{corpus}/train", "data.validation": f"{corpus}/validation"}
    tokenizer = {"data.tokenizer": f"{corpus}/tokenizer"}
    train("local", tmp_path, {**local, **tokenizer, "run.prepared": f"{tmp_path}/prepared"}, environment)
    with run_object_store(tmp_path / "log") as store:
        store.upload(corpus, "bucket/corpus")
        # The client repeats a request several times itself, of which nothing is known; the requests that are counted are
        # those that follow. So many requests for data fail that some of them are needed.
        store.behave(share_failing=0.9, seed=1)
        environment |= store.environment | {"TEMPNET_CACHE": str(tmp_path / "cache")}
        places = {"data.train": "s3://bucket/corpus/train", "data.validation": "s3://bucket/corpus/validation"}
        said = train("store", tmp_path, {**places, **tokenizer, "run.prepared": "s3://bucket/prepared"}, environment)
        num_failed = store.counts().num_failed
    outcome, reference = (read_json(f"{tmp_path}/{name}/outcome.json") for name in ("store", "local"))
    assert_same_losses(outcome, reference)
    assert num_failed > 0
    assert 0 < count_all(outcome["store_retries"]) <= num_failed
    assert set(count_by_reason(outcome["store_retries"])) <= {"slow_down", "service_unavailable", "network_connection"}
    assert not reference["store_retries"]
    assert "requests to an object store failed and were repeated: " in said
    summary = (tmp_path / "store" / "report" / "summary.txt").read_text()
    assert re.search(rf"repeated requests to object stores +{count_all(outcome['store_retries'])} \(", summary)
