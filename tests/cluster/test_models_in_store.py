"""Test a chain of jobs whose data, models and results all lie in an object store, beside the same jobs on local files."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from server_support import S3Server
from support import LANGUAGE_MODEL_OPTIONS

from pipelines.storage import read_bytes

pytestmark = pytest.mark.cluster

TINY = [
    *LANGUAGE_MODEL_OPTIONS, "--run.num-steps=6", "--run.checkpoint-every=6", "--run.log-every=3",
    "--validation.every=6", "--validation.num-blocks=8", "--validation.num-oracle-tokens=64",
    "--workers.num-workers=1", "--workers.zero-stage=0", "--tracking.no-enabled",
]  # fmt: skip


def commands(home: str, base: str, export: str) -> list[list[str]]:
    """Return the commands that start from a trained base model, with all their paths below `home`."""
    data = [f"--data.train={home}/text/train", f"--data.validation={home}/text/validation"]
    frozen = [option for option in TINY if not option.startswith(("--model.", "--temperature.target"))]
    return [
        ["train_lm", "frozen-small", *frozen, *data, "--temperature.rho=2", f"--model.path={base}",
         f"--run.storage={home}/runs"],
        ["evaluate_lm", "--models", export, "--temperatures", "one", "tempnet", "--wikitext", f"{home}/words.txt",
         "--storage", f"{home}/runs", "--tracking.no-enabled"],
        ["predict_temperatures", "--model", export, "--text", f"{home}/text/validation", "--output", f"{home}/tau"],
        ["generate", "--model", export, "--prompts", f"{home}/words.txt", "--output", f"{home}/texts.jsonl",
         "--max-new-tokens", "8"],
        ["calibrate", "rho", "--model", base, "--text", f"{home}/text/train", "--tau", "0.2", "--num-tokens", "256",
         "--context-length", "32", "--storage", f"{home}/runs", "--output", f"{home}/calibration"],
    ]  # fmt: skip


def run(command: list[str]) -> None:
    job, *arguments = command
    assert importlib.import_module(f"jobs.{job}").main(arguments) == 0, command


@pytest.mark.long
def test_a_chain_of_jobs_in_a_store_does_what_it_does_on_local_files(
    cluster: dict[str, str], s3_server: S3Server, bucket: str, corpus: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TEMPNET_MODELS", cluster["TEMPNET_MODELS"])  # The driver and the workers share their copies.
    there, here = f"s3://{bucket}", str(tmp_path / "here")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "text").symlink_to(corpus)
    (tmp_path / "here" / "words.txt").write_text("abc def\ngh ab\n")
    s3_server.upload(corpus, f"{bucket}/text")
    s3_server.upload(tmp_path / "here" / "words.txt", f"{bucket}/words.txt")
    base, export = f"{there}/runs/gpt2-scratch-small/export", f"{there}/runs/frozen-small/export"
    train = [
        "train_lm", "gpt2-scratch-small", *TINY, f"--data.train={there}/text/train",
        f"--data.validation={there}/text/validation", f"--data.tokenizer={there}/text/tokenizer",
        f"--run.storage={there}/runs",
    ]  # fmt: skip
    run(train)
    for command in commands(there, base, export):
        run(command)
    for uri, name in ((base, "base"), (export, "export")):
        s3_server.download(uri.removeprefix("s3://"), tmp_path / "here" / name)
    for command in commands(here, f"{here}/base", f"{here}/export"):
        run(command)

    def both(read: Callable[[str], Any]) -> Any:
        """Return what lies in the store, which must equal what lies in the local directory."""
        found = [read(home) for home in (there, here)]
        assert found[0] == found[1]
        return found[0]

    def scores(home: str) -> Any:
        outcome = json.loads(read_bytes(f"{home}/runs/frozen-small/outcome.json"))
        return outcome["validation"], outcome["rivals"]

    def figures(home: str) -> Any:
        columns = json.loads(read_bytes(f"{home}/runs/evaluation/results.json"))["columns"]
        return {column["temperature"]: column["metrics"] for column in columns}

    def table(home: str) -> Any:
        return pq.read_table(io.BytesIO(read_bytes(f"{home}/tau/part-00000-00000.parquet"))).to_pylist()

    def texts(home: str) -> Any:
        lines = read_bytes(f"{home}/texts.jsonl").splitlines()
        return [{**json.loads(line), "settings": ""} for line in lines]

    assert both(scores)[0]["tau_mean"] > 0
    assert both(figures).keys() == {"one", "tempnet"}
    assert len(both(table)) == 40
    assert len(both(texts)) == 2
    assert 0 < both(lambda home: json.loads(read_bytes(f"{home}/calibration/calibration.json")))["rho"] < 6.3
    assert len(read_bytes(f"{there}/calibration/curve.png")) > 5000
