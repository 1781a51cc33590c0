"""Test training runs whose real MLflow server is killed, or hangs: they go on, and nothing is lost or doubled."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow_support import Server
from support import LANGUAGE_MODEL_OPTIONS, ROOT, wait_for

from jobs.engine.metrics import MetricLogger, metric_history
from jobs.engine.tracking import open_run

pytestmark = [pytest.mark.cluster, pytest.mark.long]

NUM_STEPS, LOG_EVERY, VALIDATE_EVERY = 600, 10, 200


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "mlflow").mkdir()
    server = Server(tmp_path / "mlflow")
    server.start()
    try:
        yield server
    finally:
        server.kill()


def training_command(run: Path, corpus: Path, uri: str) -> list[str]:
    """Return the command that trains a small model in the directory `run`, and logs it to the MLflow store at `uri`."""
    return [
        sys.executable, "-m", "jobs.train_lm", "gpt2-scratch-small", *LANGUAGE_MODEL_OPTIONS, f"--run.name={run.name}",
        f"--run.storage={run.parent}", f"--run.num-steps={NUM_STEPS}", f"--run.log-every={LOG_EVERY}",
        "--run.checkpoint-every=100", "--run.max-restarts=0", f"--tracking.uri={uri}", f"--data.train={corpus / 'train'}",
        f"--data.validation={corpus / 'validation'}", f"--data.tokenizer={corpus / 'tokenizer'}", "--temperature.loss=ce",
        "--workers.num-workers=1", "--workers.cpus-per-worker=0.5", "--workers.zero-stage=0",
        f"--validation.every={VALIDATE_EVERY}",
    ]  # fmt: skip


def test_what_a_server_that_was_killed_lacks_is_sent_once_by_the_same_command(
    ray_head: dict[str, str], corpus: Path, tmp_path: Path, server: Server
) -> None:
    """A server that is back while the run goes on is the fault "MLflow killed" of test_faults.py."""
    run = tmp_path / "runs" / "outage"
    command = training_command(run, corpus, server.uri)

    def last_step() -> int:
        return max((step for name, step, _ in server.metrics() if name == "train/loss"), default=0)

    with (tmp_path / "said.txt").open("w+") as said:
        training = subprocess.Popen(command, cwd=ROOT, env=ray_head, stdout=said, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: last_step() >= 20 or training.poll() is not None)
            server.kill()
            missed_from = last_step()
            assert 0 < missed_from < NUM_STEPS / 2
            assert training.wait(timeout=600) == 0, said.seek(0) or said.read()
        finally:
            training.kill()
            training.wait()
    outcome = json.loads((run / "outcome.json").read_text())
    assert (outcome["num_steps"], outcome["resumed_from_step"]) == (NUM_STEPS, 0)
    assert last_step() == missed_from
    assert server.statuses() == ["RUNNING"]
    server.start()
    again = subprocess.run(command, cwd=ROOT, env=ray_head, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stdout + again.stderr
    assert server.statuses() == ["FINISHED"]

    found = server.metrics()
    counts = Counter((key, step) for key, step, _ in found if key.startswith(("train/", "validation/", "verdict/")))
    assert set(counts.values()) == {1}
    steps = {key: sorted(step for name, step in counts if name == key) for key, _ in counts}
    assert steps["train/loss"] == list(range(1, NUM_STEPS + 1))
    assert steps["train/tokens_per_second"] == list(range(LOG_EVERY, NUM_STEPS + 1, LOG_EVERY))
    for key, value in outcome["validation"].items():
        if (name := f"validation/{key}") in steps:
            assert steps[name] == list(range(VALIDATE_EVERY, NUM_STEPS + 1, VALIDATE_EVERY)), name
            assert (name, NUM_STEPS, pytest.approx(value, rel=1e-12)) in found
    for key, value in outcome["rivals"].items():
        assert (f"verdict/{key}", 0, pytest.approx(value, rel=1e-12)) in found


def test_a_server_that_hangs_does_not_hold_the_end_of_a_run(server: Server) -> None:
    run = open_run(
        uri=server.uri, experiment="tests", name="hangs", directory="/runs/hangs", parameters={}, tags={}, data_sets={}
    )
    expected = {step: float(step) for step in range(3000)}

    def logger() -> MetricLogger:
        return MetricLogger(run, warn=print, seconds_between_sends=60.0)

    hung = logger()
    server.signal(signal.SIGSTOP)
    for step, value in expected.items():
        hung.log({"loss": value}, step)
    started = time.monotonic()
    assert hung.close(seconds=2.0) == len(expected)
    assert time.monotonic() - started < 20
    unsent = hung.unsent()
    assert {step: value for _, value, _, step in unsent} == expected
    server.signal(signal.SIGCONT)
    later = logger()
    later.resend(unsent)
    assert later.close() == 0
    assert metric_history(run, "loss") == expected
    assert len(server.metrics()) == len(expected)
