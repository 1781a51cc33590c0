"""Test copies of what lies at URIs, on a real S3 server: they equal the source, are kept, shared and never lead out."""

from __future__ import annotations

import http.client
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from s3_support import ObjectStore

from pipelines.local_copy import is_directory, local_copy, shared_copy

RANGE = 2**16
"""What is read at a time in these tests, which is 2**23 in the product."""


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.local_copy.BLOCK_BYTES", RANGE)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def put(server: ObjectStore, path: str, content: bytes) -> None:
    with server.filesystem.open_output_stream(path) as stream:
        stream.write(content)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a directory like an exported model, with a file that is longer than what is read at a time."""
    directory = tmp_path / "runs" / "a" / "export"
    (directory / "tempnet").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "empty.txt").touch()
    (directory / "model.safetensors").write_bytes(np.random.default_rng(0).bytes(9 * RANGE + 12_345))
    (directory / "tempnet" / "config.json").write_text('{"a": 1}')
    return directory


def test_a_copy_equals_its_source_and_is_kept(s3_server: ObjectStore, bucket: str, model: Path) -> None:
    s3_server.upload(model, f"{bucket}/runs/a/export")
    uri = f"s3://{bucket}/runs/a/export"
    copy = Path(local_copy(uri))
    assert contents(copy) == contents(model)
    assert copy.name == "export"
    num_reads = s3_server.num_reads(f"{bucket}/runs/a/export/model.safetensors")
    assert num_reads == 10, "it is read in ranges"
    assert local_copy(uri) == local_copy(f"{uri}/") == str(copy)
    assert s3_server.num_reads(f"{bucket}/runs/a/export/model.safetensors") == num_reads
    (file,) = contents(Path(local_copy(f"{uri}/config.json")).parent).items()
    assert file == ("config.json", b"{}")


def test_only_what_is_wanted_is_copied(s3_server: ObjectStore, bucket: str, model: Path) -> None:
    for name in ("checkpoint-100/model.safetensors", "onnx/model.onnx", ".git/config"):
        (model / name).parent.mkdir()
        (model / name).write_bytes(b"x")
    s3_server.upload(model, f"{bucket}/m")
    wanted = {"config.json", "empty.txt", "tempnet/config.json"}
    assert contents(Path(local_copy(f"s3://{bucket}/m", with_weights=False))).keys() == wanted
    assert s3_server.num_reads(f"{bucket}/m/model.safetensors") == 0
    assert contents(Path(local_copy(f"s3://{bucket}/m"))).keys() == wanted | {"model.safetensors"}
    put(s3_server, f"{bucket}/weights/model.safetensors", b"x")
    assert list(Path(local_copy(f"s3://{bucket}/weights", with_weights=False)).iterdir()) == []


def test_what_was_rewritten_is_copied_again_and_the_old_copy_is_deleted(
    s3_server: ObjectStore, bucket: str, tmp_path: Path
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


def test_whoever_asks_at_the_same_time_gets_one_copy(s3_server: ObjectStore, bucket: str) -> None:
    put(s3_server, f"{bucket}/m/weights.bin", bytes(40 * RANGE))
    with ThreadPoolExecutor(3) as pool:  # A file's lock keeps threads apart as it does processes.
        places = set(pool.map(local_copy, [f"s3://{bucket}/m"] * 3))
    assert (Path(*places) / "weights.bin").stat().st_size == 40 * RANGE
    assert s3_server.num_reads(f"{bucket}/m/weights.bin") == 40


def test_a_shared_copy_is_made_once_and_deleted_by_the_last_who_leaves(s3_server: ObjectStore, bucket: str) -> None:
    put(s3_server, f"{bucket}/m/weights.bin", bytes(3 * RANGE))
    with shared_copy(f"s3://{bucket}/m") as first:
        with pytest.raises(RuntimeError), shared_copy(f"s3://{bucket}/m") as second:
            raise RuntimeError
        assert first == second
        assert (Path(first) / "weights.bin").stat().st_size == 3 * RANGE
    assert s3_server.num_reads(f"{bucket}/m/weights.bin") == 3
    assert not Path(first).exists()
    put(s3_server, f"{bucket}/m/weights.bin", bytes(RANGE))
    with shared_copy(f"s3://{bucket}/m") as again:
        assert (Path(again) / "weights.bin").stat().st_size == RANGE


def test_a_directory_of_another_user_is_not_read_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.getuid() + 1
    (tmp_path / f"tempnet-shared-{other}").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: other)
    with (
        pytest.raises(PermissionError, match=rf"tempnet-shared-{other} belongs to another user"),
        shared_copy("s3://b/m"),
    ):
        pass


@pytest.mark.parametrize("key", ["m/../../evil", "m/a/../../../evil", "m/./x", "m//x"])
def test_no_name_leads_out_of_the_directory(s3_server: ObjectStore, bucket: str, key: str, tmp_path: Path) -> None:
    put(s3_server, f"{bucket}/m/config.json", b"{}")
    # pyarrow would not write an object of this name.
    client = http.client.HTTPConnection(s3_server.endpoint.removeprefix("http://"))
    path = f"/{bucket}/{key}".replace("..", "%2E%2E")
    client.request("PUT", path, body=b"x", headers={"Authorization": "AWS testing:x"})
    assert client.getresponse().status == 200
    client.close()
    with pytest.raises(ValueError, match="is no name of a file: rename or delete it"):
        local_copy(f"s3://{bucket}/m")
    assert not (tmp_path / "cache").exists()


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

    class Unreachable:
        def get_file_info(self, path: str) -> None:
            raise OSError("AWS Error NETWORK_CONNECTION during HeadObject operation\ncurlCode: 7")

    monkeypatch.setattr("pipelines.local_copy.resolve", lambda uri: (Unreachable(), uri))
    with pytest.raises(ValueError, match=r"check bucket, endpoint, region and credentials .*HeadObject operation$"):
        local_copy(f"s3://{bucket}/m")
    assert not (tmp_path / "cache").exists()


def test_local_paths_and_names_on_the_hub_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in ("", "gpt2", "owner/name", "/no/such", str(tmp_path)):
        assert local_copy(source) == source
    assert local_copy(f"file://{tmp_path}") == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_copy("~/m") == f"{tmp_path}/m"  # Transformers would take it for a name on the hub.
    assert is_directory(str(tmp_path))
    assert not is_directory(str(tmp_path / "x"))


def test_too_small_a_disk_is_named_before_anything_is_copied(
    s3_server: ObjectStore, bucket: str, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk(2)
    monkeypatch.setenv("TEMPNET_MODELS", str(disk))
    put(s3_server, f"{bucket}/m/weights.bin", bytes(4 << 20))
    with pytest.raises(OSError, match=rf"and {disk} has 0\.00 GiB left: make room there, or set TEMPNET_MODELS"):
        local_copy(f"s3://{bucket}/m")
    assert not list(disk.rglob("weights.bin"))
