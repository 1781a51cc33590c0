"""Test a small sweep, started by `ray job submit`, that logs to a real MLflow server whose address has a password."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from server_support import WITHOUT_BACKGROUND_JOBS, free_port, wait_for_ports
from support import BIN, ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SECRET = "hunter2"
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Start an MLflow server that accepts everyone, and yield its address without a password."""
    port, directory = free_port(), tmp_path / "server"
    directory.mkdir()
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{directory}/mlflow.db", "--artifacts-destination", str(directory / "artifacts"),
    ]  # fmt: skip
    environment = os.environ | WITHOUT_BACKGROUND_JOBS
    process = subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_ports(process, port, timeout=120)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_it_finds_its_storage_knows_its_revision_and_keeps_the_password(
    ray_head: dict[str, str], corpus: Path, server: str, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    variables = {
        "TEMPNET_HOME": str(runs),
        "MLFLOW_TRACKING_URI": f"http://me:{SECRET}@{server}",
    }
    arguments = [
        "gpt2-rho-lr-small", "--base.run.name=rho", "--base.run.num-steps=4", "--base.run.max-restarts=0",
        f"--base.data.train={corpus}/train", f"--base.data.validation={corpus}/validation",
        f"--base.data.tokenizer={corpus}/tokenizer", "--base.data.context-length=64", "--base.model.hidden-size=64",
        "--base.validation.every=4", "--base.validation.num-oracle-tokens=512", "--base.optimizer.batch-size=8",
        "--sweep.axes", "temperature.rho=0.5,1",
    ]  # fmt: skip
    submit = subprocess.run(
        [str(BIN / "ray"), "job", "submit", "--address", ray_head["DASHBOARD"], "--working-dir", ".",
         "--runtime-env-json", json.dumps({"env_vars": variables}), "--",
         "env", f"TEMPNET_REVISION={REVISION}-dirty", "python", "-m", "jobs.sweep", *arguments],
        cwd=ROOT, env={name: value for name, value in ray_head.items() if name != "RAY_ADDRESS"}, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    said = submit.stdout + submit.stderr
    assert submit.returncode == 0, said
    assert f"http://***@{server}" in said

    client = MlflowClient(f"http://{server}")
    experiment = client.get_experiment_by_name("language-models")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    assert len(found) == 3
    for run in found:
        assert run.info.status == "FINISHED"
        assert (run.data.tags["git.revision"], run.data.tags["git.dirty"]) == (REVISION, "true")
        assert run.data.tags["ray_job_id"].startswith("raysubmit_")
        assert run.data.params.get("tracking.uri", run.data.params.get("base.tracking.uri")) == f"http://***@{server}"

    assert (runs / "rho" / "results.json").is_file()
    assert SECRET not in said
    for file in [*runs.rglob("*"), *(tmp_path / "server").rglob("*")]:
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
