"""Resolve paths and URIs to filesystems; read, atomically write and hash small JSON values, such as manifests."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from pipelines.store_errors import names_store, names_written_store

MANIFEST_FILE = "manifest.json"
"""Name of the file that describes a prepared data set."""

_NUM_ATTEMPTS = 10  # of a request to S3


@names_store
def resolve(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the filesystem of a URI (`s3://`, `gs://`, `file://`, ...) or local path, and the path within it.

    Raises:
        ValueError: if the URI is empty or pyarrow does not know its scheme.
        OSError: if the address of an object store cannot be found; the message says what to set.
    """
    if not uri:
        raise ValueError("uri is empty; expected a local path or a URI such as s3://bucket/directory")
    if not is_utf8(uri):
        raise ValueError(f"uri {uri!a} is not UTF-8: rename the file or directory")
    if "://" not in uri:
        return fs.LocalFileSystem(), str(Path(uri).expanduser().absolute())
    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"uri {uri!r} is not understood ({error}); expected a local path or file://, s3://, gs://, hdfs://"
        ) from error
    if isinstance(filesystem, fs.S3FileSystem):
        filesystem = _S3FileSystem(**filesystem.__reduce__()[1][0])
    return filesystem, path.rstrip("/") or path


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded: names of files that are not UTF-8 hold surrogates, as everywhere in Python."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _S3FileSystem(fs.S3FileSystem):
    """S3 with the number of attempts that pyarrow gives to a URI, also where Ray has pickled it.

    pyarrow repeats a request that fails up to 10 times for a filesystem from a URI, but only 3 times after pickling.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, retry_strategy=fs.AwsDefaultS3RetryStrategy(max_attempts=_NUM_ATTEMPTS))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(_S3FileSystem, **super().__reduce__()[1][0]), ()


def relative(path: str, root: str) -> str:
    """Return `path` relative to the directory `root`, or only its file name if it equals `root` or is not below it."""
    directory = f"{root.rstrip('/')}/"
    return path.removeprefix(directory) if path.startswith(directory) else path.rpartition("/")[2]


def split_query(uri: str) -> tuple[str, str]:
    """Return a URI without its query, and the query with its question mark; a path has none."""
    place, mark, query = uri.partition("?") if "://" in uri else (uri, "", "")
    return place, mark + query


def join(uri: str, name: str) -> str:
    """Return the path or URI of what has a name in the directory at `uri`; a query of the URI stays at its end."""
    place, query = split_query(uri)
    return f"{place.rstrip('/')}/{name}{query}"


def exists(uri: str) -> bool:
    """Return whether there is a file or directory at a path or URI."""
    filesystem, path = resolve(uri)
    return filesystem.get_file_info(path).type != fs.FileType.NotFound


@names_written_store
def create_directory(uri: str) -> None:
    """Create the directory at a path or URI, and those above it, unless they exist."""
    filesystem, path = resolve(uri)
    filesystem.create_dir(path, recursive=True)


@names_store
def read_bytes(uri: str) -> bytes:
    """Return the content of the file at a path or URI."""
    filesystem, path = resolve(uri)
    with filesystem.open_input_stream(path) as stream:
        content: bytes = stream.read()
    return content


@names_written_store
def write_bytes(uri: str, content: bytes | pa.Buffer) -> None:
    """Write a file atomically: a reader sees all of it or none (one that has mapped the old file, the old one), and if the
    disk is full the old file remains."""
    filesystem, path = resolve(uri)
    directory, _, name = path.rpartition("/")
    # The name is unique, as other processes may write the same file; the underscore hides it from readers of the directory.
    partial = f"{directory}/_{name}.{uuid.uuid4().hex}.partial"
    try:
        with filesystem.open_output_stream(partial) as stream:
            stream.write(content)
        filesystem.move(partial, path)
    except OSError as error:
        with suppress(OSError):
            filesystem.delete_file(partial)
        if error.errno is None:  # The error comes from an object store, which has no error numbers.
            raise
        raise OSError(error.errno, os.strerror(error.errno), path) from error


def arrow_file(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.Buffer:
    """Return the content of an Arrow file of record batches."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


@names_store
def read_json(uri: str) -> dict[str, Any] | None:
    """Return the JSON object stored at a URI, or None if there is no such file."""
    filesystem, path = resolve(uri)
    if filesystem.get_file_info(path).type != fs.FileType.File:
        return None
    content = read_bytes(uri)
    try:
        values = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{uri} is damaged, it does not hold JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{uri} is damaged: it holds no JSON object")
    return values


@names_written_store
def write_json(uri: str, content: Mapping[str, Any]) -> None:
    """Write a JSON object as :func:`write_bytes` does."""
    write_bytes(uri, json.dumps(content, indent=1).encode())


def compute_digest(content: object) -> str:
    """Return a hash of a JSON value as 16 hex digits."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def write_manifest(directory: str, content: dict[str, Any]) -> None:
    """Write a manifest to its directory; the presence of this file marks the directory as complete."""
    write_json(f"{directory}/{MANIFEST_FILE}", content)


def read_manifest(directory: str, *, noun: str, field: str, version: int) -> dict[str, Any]:
    """Read the manifest of a prepared directory; `field` is one that only manifests of this kind (`noun`) have."""
    content = read_json(f"{directory}/{MANIFEST_FILE}")
    if content is None:
        raise FileNotFoundError(f"{directory} holds no {MANIFEST_FILE}: it is not a (completely) prepared data set")
    if field not in content or content.get("version") != version:
        raise ValueError(
            f"{directory} does not hold prepared {noun} of version {version}, which this program reads: prepare it again"
        )
    return content


def check_empty(directory: Path) -> None:
    """Raise FileExistsError if `directory` exists and is not an empty directory."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise FileExistsError(f"directory {str(directory)!r} is not empty; remove it or choose another")


@contextmanager
def created_at_once(directory: Path) -> Iterator[Path]:
    """Yield a staging directory that becomes `directory` by a rename at the end, or is deleted if the block raises."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as temporary:
        # The data are written to a subdirectory, because the temporary directory itself is readable by its owner only.
        staging = Path(temporary, "staging")
        staging.mkdir()
        yield staging
        staging.rename(directory)
