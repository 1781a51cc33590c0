"""Provide one Ray head with token authentication that all cluster tests share, and what runs on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from readme_support import recipe, run_line
from s3_support import ObjectStore
from server_support import Node, free_port, head_with_dashboard, ray_environment, wait_for_ports
from support import LANGUAGE_MODEL_OPTIONS, outcome_of, wait_for

from jobs.engine.cluster import ensure_token

_NUM_STARTS = 3


@pytest.fixture(scope="session")
def ray_head(s3_server: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a head, whose workers can use the object store of :func:`s3_server`, and yield its environment variables.

    RAY_ADDRESS is added to them, and so are DASHBOARD, the dashboard's address, and HEAD_PID, the head's process ID.
    """
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    environment = ray_environment() | {
        # Without this, a head that is told to end would wait half a minute for other nodes to take over its work.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # What a test has read from an object store must not be there for the next run of the tests.
        "TEMPNET_CACHE": str(tmp_path_factory.mktemp("cache")),
        "TEMPNET_MODELS": str(tmp_path_factory.mktemp("copies")),
        **s3_server.environment,
    }
    ensure_token()  # `ray get-auth-token --generate` would replace the token of a head that starts at the same time
    log = tmp_path_factory.mktemp("head") / "log"
    for attempt in range(1, _NUM_STARTS + 1):
        port, dashboard, _ = ports = [free_port() for _ in range(3)]
        head = Node(*head_with_dashboard(*ports), num_cpus=4, environment=environment, log=log)
        try:
            wait_for_ports(head.process, *ports)  # the agent comes last, and a head whose agent does not come ends
            # On a busy machine a head gives up after its ports have opened.
            wait_for(lambda: head.process.poll() is not None or "Ray runtime started" in log.read_text())  # noqa: B023
            assert head.process.poll() is None, "it gave up"
            break
        except AssertionError as error:
            head.kill()
            if attempt == _NUM_STARTS:
                raise AssertionError(f"Ray's head did not start ({error}); it printed:\n{log.read_text()}") from None
    try:
        yield environment | {
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "DASHBOARD": f"http://127.0.0.1:{dashboard}",
            "HEAD_PID": str(head.process.pid),
        }
    finally:
        ray.shutdown()
        # The head is a child process that is ended by a signal: `ray stop` would end every Ray on this machine.
        head.process.terminate()
        head.process.wait(timeout=60)


@contextmanager
def connected(ray_head: dict[str, str]) -> Iterator[pytest.MonkeyPatch]:
    """Connect this process to the head, and yield a MonkeyPatch whose changes are undone at the end of the block."""
    from jobs.engine.cluster import start_ray

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "PATH"):
            patch.setenv(name, ray_head[name])
        start_ray()
        yield patch


@pytest.fixture
def cluster(ray_head: dict[str, str]) -> Iterator[dict[str, str]]:
    """Connect this process to the head, and yield the head's environment variables."""
    with connected(ray_head):
        yield ray_head


@pytest.fixture
def home(cluster: dict[str, str], home_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the README reader's directory the working directory, so that the README's lines can be run as they stand."""
    monkeypatch.chdir(home_directory)
    for name in ("TEMPNET_HOME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    yield home_directory
    # A run that had to be restarted ends well all the same.
    assert not list((home_directory / "runs").rglob("failure.json"))


@pytest.fixture(scope="session")
def reference(ray_head: dict[str, str], home_directory: Path) -> dict[str, Any]:
    """Train the language model of `make run` for a few steps with two workers, ZeRO 2 and float32, and return the outcome.

    Other runs must equal this one, or start from it.
    """
    with connected(ray_head) as patch:
        patch.chdir(home_directory)
        run_line(recipe("run")[3], *LANGUAGE_MODEL_OPTIONS)
    # The pages use two models of `make run`; here one is in both places.
    (home_directory / "runs" / "gpt2-ce-small").mkdir()
    (home_directory / "runs" / "gpt2-ce-small" / "export").symlink_to("../gpt2-scratch-small/export")
    return outcome_of(home_directory, "gpt2-scratch-small")
