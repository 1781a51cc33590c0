"""Test how a job starts Ray, with a token that its user's jobs share, and what it says when Ray's head is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import ray_constants
from ray.exceptions import ActorUnavailableError
from ray.train.v2.api.exceptions import ControllerError

from jobs.engine import cluster, ray_failures, ray_private
from jobs.engine.cluster import check_machine, check_resources, ensure_token, private_directory, start_ray
from jobs.engine.ray_failures import HeadWatch
from jobs.engine.resumption import FatalTrainingError
from pipelines.storage import read_json


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"

        class Context:
            gcs_address = address

        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "get_runtime_context", Context)
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield listening


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ray's processes end six seconds after their head, which is given up when it does not answer for .2 s."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "6")
    monkeypatch.setattr(ray_failures, "_SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(ray_failures, "_SHARE_OF_PATIENCE", 0.2 / 6)
    monkeypatch.setattr(cluster, "_SECONDS_TO_ANSWER", 0.2)


def unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("The actor is temporarily unavailable: RpcError", b"\0" * 16)


@pytest.mark.parametrize("error", [unavailable(), ControllerError(unavailable())])
def test_an_error_of_ray_without_its_head_says_that_the_head_is_lost(
    head: socket.socket, error: Exception, tmp_path: Path
) -> None:
    address = "{}:{}".format(*head.getsockname())
    head.close()
    with pytest.raises(FatalTrainingError) as caught, HeadWatch(str(tmp_path)):
        raise error
    assert str(caught.value).startswith(f"Ray's head at {address} does not answer: ")
    assert str(caught.value).endswith("the same command then begins again at step 0")
    assert (read_json(f"{tmp_path}/failure.json") or {})["cause"] == str(caught.value)


def test_a_raylet_that_is_killed_interrupts_the_run(
    head: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raylet = subprocess.Popen(["sleep", "100"])
    node = SimpleNamespace(all_processes={"raylet": [SimpleNamespace(process=raylet)]})
    monkeypatch.setattr(ray_private.worker, "_global_node", node)
    with HeadWatch(str(tmp_path)) as watch:
        threading.Event().wait(0.3)
        assert not watch.message
        raylet.kill()
        with pytest.raises(KeyboardInterrupt):
            threading.Event().wait(30)
    assert watch.message.startswith("Ray's process on this machine that starts the workers, the raylet, was lost")
    assert watch.explain(unavailable()) == watch.message  # also if Ray's error is there first


def test_a_lost_process_of_a_head_that_answers_is_told(head: socket.socket, tmp_path: Path) -> None:
    expected = r"^Ray has lost a process that the run cannot do without.*the same command"
    with pytest.raises(FatalTrainingError, match=expected), HeadWatch(str(tmp_path)):
        raise unavailable()


@pytest.mark.parametrize("error", [ValueError("a field"), ControllerError(RuntimeError("a bug")), KeyboardInterrupt()])
def test_other_errors_stay_as_they_are(head: socket.socket, error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, HeadWatch(str(tmp_path)):
        raise error
    assert caught.value is error


def test_a_head_that_is_lost_without_an_error_interrupts_the_run(
    head: socket.socket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HeadWatch(str(tmp_path)) as watch:
        time.sleep(0.5)
        assert not watch.message
        head.close()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(30)
    assert watch.message.startswith("Ray's head at 127.0.0.1:")
    assert capsys.readouterr().err == f"{watch.message}\n"


def test_a_cluster_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConnectionError, match=r"RAY_ADDRESS = 127\.0\.0\.1:1, but no head"):
        start_ray()


def test_what_is_no_head_is_refused(head: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "address_that_ray_asks", lambda address: address)
    with pytest.raises(ConnectionError, match=r"RAY_ADDRESS = \S+: what listens there is no head of a Ray cluster"):
        check_machine()


def test_auto_means_a_cluster_of_ray_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would join a Ray that another job has started for itself, and wait for it without limit."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(cluster, "find_started_cluster", lambda: "")
    with pytest.raises(ConnectionError, match="RAY_ADDRESS = auto, but no cluster was started by `ray start`"):
        check_machine()


def test_what_ray_writes_lies_where_a_socket_has_room_and_nobody_else_can_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'x' * 90}")
    assert private_directory() == Path(f"/tmp/ray-{os.getuid()}")
    monkeypatch.setattr(cluster, "_MAX_DIRECTORY_BYTES", 200)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / f"ray-{os.getuid()}").mkdir(mode=0o777)
    assert stat.S_IMODE(private_directory().stat().st_mode) == 0o700
    private_directory().rmdir()
    (tmp_path / f"ray-{os.getuid()}").symlink_to(tmp_path)  # as another user could have made it
    assert private_directory() != tmp_path / f"ray-{os.getuid()}"
    monkeypatch.setattr(cluster, "_MAX_DIRECTORY_BYTES", 5)
    with pytest.raises(OSError, match="set RAY_TMPDIR to a short path"):
        private_directory()


@pytest.mark.parametrize("address", ["head:6379", "local"])
def test_room_that_is_missing_is_asked_for_where_a_cluster_may_grow(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[list[dict[str, float]]] = []

    def total() -> dict[str, float]:
        """Return 2 CPUs until nodes were asked for twice."""
        return {"CPU": 8.0, "GPU": 4.0} if len(requests) > 1 else {"CPU": 2.0}

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(cluster, "_SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(ray, "cluster_resources", total)
    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", lambda bundles: requests.append(bundles))
    wanted: dict[str, Any] = {"num_workers": 2, "cpus_per_worker": 1.0, "use_gpu": True, "data_cpus": 1.5}
    if address == "local":
        with pytest.raises(ValueError, match=r"3\.5 CPUs are more than there are, the cluster has 2"):
            check_resources(**wanted)
        assert not requests
        return
    check_resources(**wanted, num_runs=2)
    asked = ([{"CPU": 1.0, "GPU": 1}] * 2 + [{"CPU": 0.75}] * 2) * 2
    assert requests == [asked, asked, []]
    assert "too few nodes for CPU=7, GPU=4: asking its autoscaler, for at most 60 minutes" in capsys.readouterr().err
    with pytest.raises(ValueError, match="10 GPUs, 1 a worker, more than there are"):
        check_resources(num_workers=10, cpus_per_worker=0.5, use_gpu=True, data_cpus=0.0, max_wait_minutes=0.0)
    assert requests[-1] == []


@pytest.mark.parametrize(("asked", "opens"), [(None, False), ("1", True)])
def test_ray_is_told_to_listen_on_loopback_unless_all_addresses_are_asked_for(
    asked: str | None, opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", not opens)
    monkeypatch.setenv(name, asked or "")
    if asked is None:
        monkeypatch.delenv(name)
    ray_private.listen_on_loopback()
    assert (os.environ[name], ray_constants.ENABLE_RAY_CLUSTER) == ("1" if opens else "0", opens)


@pytest.mark.parametrize("num_failures", [2, 3])
def test_a_ray_that_is_slow_to_start_is_tried_again(num_failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[subprocess.Popen[bytes]] = []

    def init(**options: Any) -> None:
        if len(left) < num_failures:
            left.append(subprocess.Popen(["sleep", "100"]))
            raise Exception("The current node timed out during startup. This could happen because …")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Otherwise this process, and what later tests start, would be told that Ray starts no clusters.
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    if num_failures < 3:
        start_ray()
    else:
        with pytest.raises(TimeoutError, match="3 times: the machine is too busy"):
            start_ray()
    # The processes of the failed starts have been killed.
    assert [process.wait(timeout=10) for process in left] == [-signal.SIGKILL] * num_failures


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / ".ray" / "auth_token"


def test_all_processes_that_start_at_once_have_the_same_token(token: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, seen = context.Barrier(4, timeout=60), context.Queue()

    def make() -> None:
        barrier.wait()
        ensure_token()
        seen.put(token.read_text())

    processes = [context.Process(target=make, daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    assert {seen.get(timeout=60) for _ in processes} == {token.read_text()}
    for process in processes:
        process.join()
    assert len(bytes.fromhex(token.read_text())) == 32
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    before = token.read_text()
    token.chmod(0o644)
    ensure_token()  # One that exists is kept and closed to others.
    assert (token.read_text(), stat.S_IMODE(token.stat().st_mode)) == (before, 0o600)


def test_a_home_directory_that_cannot_be_written_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HOME", "/proc/nobody")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(cluster, "_MAX_DIRECTORY_BYTES", 200)
    ensure_token()
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert token == tmp_path / f"ray-{os.getuid()}" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("name", "value"),
    [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "secret"), ("RAY_AUTH_TOKEN_PATH", "elsewhere")],
)
def test_none_is_made_where_none_is_read(token: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    ensure_token()
    assert not token.parent.exists()
