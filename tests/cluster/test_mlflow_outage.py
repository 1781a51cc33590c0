"""Test that a real MLflow server which hangs does not hold a run. One that is killed is a fault of test_faults.py."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_support import MlflowServer

from jobs.engine.metrics import MetricLogger, metric_history
from jobs.engine.tracking import open_run

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MlflowServer]:
    (tmp_path / "mlflow").mkdir()
    server = MlflowServer(tmp_path / "mlflow")
    server.start()
    try:
        yield server
    finally:
        server.kill()


def test_a_server_that_hangs_does_not_hold_the_end_of_a_run(server: MlflowServer) -> None:
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
    assert server.query("SELECT COUNT(*) FROM metrics") == [(len(expected),)]
