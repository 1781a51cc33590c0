"""Test what `ray job submit` starts on a cluster of two nodes with token authentication: training, evaluation and a sweep.

The sweep logs to a real MLflow server whose address has a password.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from killing import at_the_same_time
from mlflow import MlflowClient
from node_support import second_node
from server_support import WITHOUT_BACKGROUND_JOBS, free_port, wait_for_ports
from support import BIN, LANGUAGE_MODEL_OPTIONS, ROOT, wait_for

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
        wait_for_ports(process, port)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def submit(cluster: dict[str, str], variables: dict[str, str], *command: str) -> str:
    """Submit a command by `ray job submit` from the checkout, assert that it ends well, and return what is printed."""
    done = subprocess.run(
        [str(BIN / "ray"), "job", "submit", "--address", cluster["DASHBOARD"], "--working-dir", ".",
         "--runtime-env-json", json.dumps({"env_vars": variables}), "--", *command],
        cwd=ROOT, env={name: value for name, value in cluster.items() if name != "RAY_ADDRESS"}, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def test_training_and_its_evaluation_use_both_nodes(cluster: dict[str, str], corpus: Path, tmp_path: Path) -> None:
    """Each of the two workers that train needs more than half of a node."""
    variables = {"TEMPNET_HOME": str(tmp_path / "runs"), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    data = [
        f"--data.train={corpus}/train", f"--data.validation={corpus}/validation",
        f"--data.tokenizer={corpus}/tokenizer",
    ]  # fmt: skip
    workers = ["--workers.placement=spread", "--workers.cpus-per-worker=3", "--workers.num-workers=2"]
    text = tmp_path / "words.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 50)
    with second_node(cluster) as node:
        seen: list[int] = []

        def watch() -> None:
            wait_for(lambda: bool(node.processes("ray::RayTrainWorker")), seconds=300)
            seen.append(len(node.processes("ray::RayTrainWorker")))

        with at_the_same_time(watch):
            said = submit(
                cluster, variables,
                "python", "-m", "jobs.train_lm", "gpt2-scratch-small", *LANGUAGE_MODEL_OPTIONS, *data, *workers,
                "--run.name=both",
            )  # fmt: skip
        assert seen == [1]
        assert "validation perplexity at τ" in said
        said = submit(
            cluster, variables,
            "python", "-m", "jobs.evaluate_lm", "--models", f"{tmp_path}/runs/both/export",
            "--temperatures", "one", "tempnet", "--wikitext", str(text), "--workers.num-workers=2",
        )  # fmt: skip
    columns = json.loads((tmp_path / "runs" / "evaluation" / "results.json").read_text())["columns"]
    perplexities = {column["temperature"]: column["metrics"]["wikitext/word_perplexity"] for column in columns}
    assert perplexities.keys() == {"one", "tempnet"}
    assert all(1.0 < perplexity < math.inf for perplexity in perplexities.values())
    assert f"{perplexities['tempnet']:,.2f}" in said
    outcome = json.loads((tmp_path / "runs" / "both" / "outcome.json").read_text())
    assert outcome["world_size"] == 2


def test_a_sweep_finds_its_storage_knows_its_revision_and_keeps_the_password(
    cluster: dict[str, str], corpus: Path, server: str, tmp_path: Path
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
    with second_node(cluster):
        said = submit(
            cluster, variables, "env", f"TEMPNET_REVISION={REVISION}-dirty", "python", "-m", "jobs.sweep", *arguments
        )
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
