"""Tests what a run says when Ray's head is lost, with an error of Ray's or without one; a socket stands for the head."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.exceptions import ActorUnavailableError
from ray.train.v2.api.exceptions import ControllerError

from jobs.engine import cluster
from jobs.engine.cluster import start_ray
from jobs.engine.cluster_loss import HeadWatch, LostClusterError, naming_lost_cluster
from pipelines.storage import read_json

ROOT = Path(__file__).parents[3]


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Yield a socket that listens where Ray's head is said to be."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"

        class Context:
            gcs_address = address

        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "get_runtime_context", Context)
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield listening


def unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("The actor is temporarily unavailable: RpcError", b"\0" * 16)


@pytest.mark.parametrize("error", [unavailable(), ControllerError(unavailable())])
def test_an_error_of_ray_without_its_head_says_that_the_head_is_lost(
    head: socket.socket, error: Exception, tmp_path: Path
) -> None:
    address = "{}:{}".format(*head.getsockname())
    head.close()
    with pytest.raises(LostClusterError) as caught, naming_lost_cluster(str(tmp_path)):
        raise error
    assert str(caught.value) == (
        f"Ray's head at {address} does not answer: the cluster is lost, or its control service is. To continue, start the "
        "cluster again: the same command then begins again at step 0"
    )
    assert (read_json(f"{tmp_path}/failure.json") or {})["cause"] == str(caught.value)


def test_a_lost_process_of_a_head_that_answers_is_told(head: socket.socket, tmp_path: Path) -> None:
    with (
        pytest.raises(
            LostClusterError, match=r"^Ray has lost a process that the run cannot do without.*the same command"
        ),
        naming_lost_cluster(str(tmp_path)),
    ):
        raise unavailable()


@pytest.mark.parametrize("error", [ValueError("a field"), ControllerError(RuntimeError("a bug")), KeyboardInterrupt()])
def test_other_errors_stay_as_they_are(head: socket.socket, error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, naming_lost_cluster(str(tmp_path)):
        raise error
    assert caught.value is error


def test_a_head_that_is_lost_without_an_error_interrupts_the_run(head: socket.socket, tmp_path: Path) -> None:
    with HeadWatch(str(tmp_path), patience=0.2, seconds_to_end=20.0, seconds_between_looks=0.05) as watch:
        time.sleep(0.5)
        assert not watch.message
        head.close()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(30)
    assert watch.message.startswith("Ray's head at 127.0.0.1:")


def test_a_run_that_cannot_be_interrupted_is_ended_with_the_message(tmp_path: Path) -> None:
    code = f"""
import signal, time, ray
from jobs.engine.cluster_loss import HeadWatch
ray.is_initialized = lambda: True
ray.get_runtime_context = lambda: type("Context", (), dict(gcs_address="127.0.0.1:1"))
signal.signal(signal.SIGINT, signal.SIG_IGN)
with HeadWatch({str(tmp_path)!r}, patience=0.1, seconds_to_end=0.2, seconds_between_looks=0.05):
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert re.fullmatch(r"error: Ray's head at 127\.0\.0\.1:1 does not answer: .*\n", done.stderr)


def test_a_cluster_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(cluster, "_SECONDS_TO_ANSWER", 0.2)
    with pytest.raises(
        ConnectionError, match=r"RAY_ADDRESS = 127\.0\.0\.1:1, but no head of a Ray cluster answers there"
    ):
        start_ray()
