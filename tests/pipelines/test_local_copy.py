"""Test copies of what lies at URIs, on a real S3 server: they equal the source, are kept, shared and never lead out."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from server_support import S3Server, free_port

from pipelines.local_copy import is_directory, local_copy

ROOT = Path(__file__).parents[2]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def put(server: S3Server, path: str, content: bytes) -> None:
    with server.filesystem.open_output_stream(path) as stream:
        stream.write(content)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a directory like an exported model, with a file that is longer than what is read at a time."""
    directory = tmp_path / "runs" / "a" / "export"
    (directory / "tempnet").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "empty.txt").touch()
    (directory / "model.safetensors").write_bytes(np.random.default_rng(0).bytes((64 << 20) + (8 << 20) + 12_345))
    (directory / "tempnet" / "config.json").write_text('{"a": 1}')
    return directory


def test_a_copy_equals_its_source_and_is_kept(s3_server: S3Server, bucket: str, model: Path) -> None:
    s3_server.upload(model, f"{bucket}/runs/a/export")
    uri = f"s3://{bucket}/runs/a/export"
    copy = Path(local_copy(uri))
    assert contents(copy) == contents(model)
    assert copy.name == "export"
    num_reads = s3_server.num_reads(f"{bucket}/runs/a/export/model.safetensors")
    assert num_reads > 8  # The file is read in ranges of 8 MiB.
    assert local_copy(uri) == local_copy(f"{uri}/") == str(copy)
    assert s3_server.num_reads(f"{bucket}/runs/a/export/model.safetensors") == num_reads
    (file,) = contents(Path(local_copy(f"{uri}/config.json")).parent).items()
    assert file == ("config.json", b"{}")


def test_only_what_is_wanted_is_copied(s3_server: S3Server, bucket: str, model: Path) -> None:
    for name in ("checkpoint-100/model.safetensors", "onnx/model.onnx", ".git/config"):
        (model / name).parent.mkdir()
        (model / name).write_bytes(b"x")
    s3_server.upload(model, f"{bucket}/m")
    assert contents(Path(local_copy(f"s3://{bucket}/m", with_weights=False))).keys() == {
        "config.json", "empty.txt", "tempnet/config.json",
    }  # fmt: skip
    assert s3_server.num_reads(f"{bucket}/m/model.safetensors") == 0
    put(s3_server, f"{bucket}/weights/model.safetensors", b"x")
    assert contents(Path(local_copy(f"s3://{bucket}/weights", with_weights=False))) == {}
    assert Path(local_copy(f"s3://{bucket}/weights", with_weights=False)).is_dir()
    assert contents(Path(local_copy(f"s3://{bucket}/m"))).keys() == {
        "config.json", "empty.txt", "tempnet/config.json", "model.safetensors",
    }  # fmt: skip


def test_what_was_rewritten_is_copied_again_and_the_old_copy_is_deleted(
    s3_server: S3Server, bucket: str, tmp_path: Path
) -> None:
    put(s3_server, f"{bucket}/m/config.json", b"old")
    put(s3_server, f"{bucket}/m/gone.json", b"old")
    uri = f"s3://{bucket}/m"
    old = Path(local_copy(uri))
    s3_server.filesystem.delete_file(f"{bucket}/m/gone.json")
    put(s3_server, f"{bucket}/m/config.json", b"newer")
    assert contents(Path(local_copy(uri))) == {"config.json": b"newer"}
    assert not old.exists()
    assert len(list((tmp_path / "cache").rglob("config.json"))) == 1


def test_processes_of_a_machine_copy_once(s3_server: S3Server, bucket: str, tmp_path: Path) -> None:
    put(s3_server, f"{bucket}/m/weights.bin", bytes(40 << 20))
    script = f"from pipelines.local_copy import local_copy\nprint(local_copy('s3://{bucket}/m'))"
    processes = [
        subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    places = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(places) == 1
    assert (Path(places.pop()) / "weights.bin").stat().st_size == 40 << 20
    assert s3_server.num_reads(f"{bucket}/m/weights.bin") == 5  # as many as there are ranges of 8 MiB


@pytest.mark.parametrize("key", ["m/../../evil", "m/a/../../../evil", "m/./x", "m//x"])
def test_no_name_leads_out_of_the_directory(s3_server: S3Server, bucket: str, key: str, tmp_path: Path) -> None:
    put(s3_server, f"{bucket}/m/config.json", b"{}")
    http_put(s3_server, f"/{bucket}/{key}")
    with pytest.raises(ValueError, match="is no name of a file: rename or delete it"):
        local_copy(f"s3://{bucket}/m")
    assert not (tmp_path / "cache").exists()


def http_put(server: S3Server, path: str) -> None:
    """Write an object under a name that pyarrow would not write."""
    client = http.client.HTTPConnection(server.endpoint.removeprefix("http://"))
    client.request("PUT", path.replace("..", "%2E%2E"), body=b"x", headers={"Authorization": "AWS testing:x"})
    assert client.getresponse().status == 200
    client.close()


def test_what_is_missing_or_out_of_reach_is_said_in_one_line(
    bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for uri in (f"s3://{bucket}/nothing", "s3://no-such-bucket-here/model"):
        with pytest.raises(
            ValueError, match=f"^'{uri}' is missing: there is no such file or directory, or no such bucket$"
        ):
            local_copy(uri)
        assert not is_directory(uri)
    with pytest.raises(ValueError, match="'nonsense://x/y' is not understood"):
        local_copy("nonsense://x/y")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(
        ValueError, match=r"cannot be read: check bucket, endpoint, region and credentials .*NETWORK"
    ) as told:
        local_copy(f"s3://{bucket}/m")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "cache").exists()


def test_local_paths_and_names_on_the_hub_stay_as_they_are(tmp_path: Path) -> None:
    for source in ("", "gpt2", "owner/name", "/no/such", str(tmp_path)):
        assert local_copy(source) == source
    assert local_copy(f"file://{tmp_path}") == str(tmp_path)
    assert is_directory(str(tmp_path))
    assert not is_directory(str(tmp_path / "x"))


def test_too_small_a_disk_is_named_before_anything_is_copied(
    s3_server: S3Server, bucket: str, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk(2)
    monkeypatch.setenv("TEMPNET_MODELS", str(disk))
    put(s3_server, f"{bucket}/m/weights.bin", bytes(4 << 20))
    with pytest.raises(OSError, match=rf"and {disk} has 0\.00 GiB left: make room there, or set TEMPNET_MODELS"):
        local_copy(f"s3://{bucket}/m")
    assert not list(disk.rglob("weights.bin"))


@contextmanager
def failing(server: S3Server, path: str, num_failures: int) -> Iterator[str]:
    """Run a proxy that answers the first requests for the content of an object with 503, and yield its endpoint."""
    left = [num_failures]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.command == "GET" and self.path.startswith(path) and left[0]:
                left[0] -= 1
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            client = http.client.HTTPConnection(server.endpoint.removeprefix("http://"))
            client.request(self.command, self.path, headers=dict(self.headers))
            answer = client.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "date", "server", "transfer-encoding"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()
    assert left == [0]


def test_a_store_that_fails_for_a_while_is_asked_again(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client itself asks three times, so six failures need two attempts more."""
    put(s3_server, f"{bucket}/m/config.json", b"{}")
    with failing(s3_server, f"/{bucket}/m/config.json", 6) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert contents(Path(local_copy(f"s3://{bucket}/m"))) == {"config.json": b"{}"}
