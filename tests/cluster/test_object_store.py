"""Test data, models and whole jobs in a real S3 server: they do what they do with local files, also if the server fails."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from s3_support import ObjectStore
from support import FROZEN_OPTIONS, LANGUAGE_MODEL_OPTIONS, assert_same_losses

from pipelines.storage import read_bytes, read_json, write_bytes

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture
def store(s3_server: ObjectStore) -> Iterator[ObjectStore]:
    """Return the server, which all processes of the shared Ray can use, and which does what it should after the test."""
    s3_server.behave()
    yield s3_server
    s3_server.behave()


@pytest.fixture
def place(
    cluster: dict[str, str], store: ObjectStore, bucket: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Return the URI of a bucket that holds the corpus."""
    monkeypatch.setenv("TEMPNET_MODELS", cluster["TEMPNET_MODELS"])  # The driver and the workers share their copies.
    store.upload(corpus, f"{bucket}/text")
    return f"s3://{bucket}"


def run(place: str, command: str, *options: str) -> None:
    job, *words = command.replace("AT/", f"{place}/").split()
    assert importlib.import_module(f"jobs.{job}").main([*words, *options]) == 0, command


TINY = [
    "--run.num-steps=6", "--run.checkpoint-every=6", "--run.log-every=3",
    "--validation.every=6", "--validation.num-blocks=8", "--validation.num-oracle-tokens=64", "--workers.zero-stage=0",
    "--tracking.no-enabled",
]  # fmt: skip
DATA = "--data.train AT/text/train --data.validation AT/text/validation --run.storage AT/runs --workers.num-workers 1"


def test_a_chain_of_jobs_reads_and_writes_in_a_store(place: str) -> None:
    """Each job starts from what the one before has written; that a copy is the model is tested in tests/jobs."""
    write_bytes(f"{place}/words.txt", b"abc def\ngh ab\n")
    run(place, f"train_lm gpt2-scratch-small --data.tokenizer AT/text/tokenizer {DATA}", *LANGUAGE_MODEL_OPTIONS, *TINY)
    base, export = "AT/runs/gpt2-scratch-small/export", "AT/runs/frozen-small/export"
    run(place, f"train_lm frozen-small --temperature.rho 2 --model.path {base} {DATA}", *FROZEN_OPTIONS, *TINY)
    run(place, f"evaluate_lm --models {export} --temperatures one tempnet --wikitext AT/words.txt --storage AT/runs "
               "--tracking.no-enabled")  # fmt: skip
    run(place, f"predict_temperatures --model {export} --text AT/text/validation --output AT/tau")
    run(place, f"calibrate rho --model {base} --text AT/text/train --tau 0.2 --num-tokens 256 --context-length 32 "
               "--storage AT/runs --output AT/calibration")  # fmt: skip
    assert read_json(f"{place}/runs/frozen-small/outcome.json")["validation"]["tau_mean"] > 0
    columns = read_json(f"{place}/runs/evaluation/results.json")["columns"]
    assert [column["temperature"] for column in columns] == ["one", "tempnet"]
    assert pq.read_table(io.BytesIO(read_bytes(f"{place}/tau/part-00000-00000.parquet"))).num_rows == 40
    assert 0 < read_json(f"{place}/calibration/calibration.json")["rho"] < 6.3
    assert len(read_bytes(f"{place}/calibration/curve.png")) > 5000


def test_a_store_that_fails_costs_time_and_is_counted(
    place: str, store: ObjectStore, reference: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The client repeats a request several times itself, of which nothing is known; the requests that are counted are those
    # that follow. So many requests for data fail that some of them are needed.
    store.behave(share_failing=0.9, seed=1)
    command = f"train_lm gpt2-scratch-small --data.tokenizer AT/text/tokenizer {DATA} --run.prepared AT/prepared"
    local = [f"--run.storage={tmp_path}", f"--tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    run(place, command, *LANGUAGE_MODEL_OPTIONS, *local)
    num_failed = store.counts().num_failed
    outcome = read_json(f"{tmp_path}/gpt2-scratch-small/outcome.json")
    assert_same_losses(outcome, reference, tolerance=1e-5)
    assert num_failed > 0
    assert 0 < outcome["store_retries"] <= num_failed
    assert not reference["store_retries"]
    assert "requests to an object store failed and were repeated: " in capsys.readouterr().out
    summary = (tmp_path / "gpt2-scratch-small" / "report" / "summary.txt").read_text()
    assert re.search(rf"repeated requests to object stores +{outcome['store_retries']}\n", summary)
