"""Copies what lies at a remote URI (a model, a tokenizer, a small data set) to this machine, for readers that need files.

Every machine keeps one copy for all of its processes, in $TEMPNET_MODELS or `~/.cache/tempnet`, and uses it for as long as
the names, sizes and times at the URI stay the same. Whoever reads a model calls :func:`local_copy` where the model is read,
and keeps the URI everywhere else. A local path or a name on the Hugging Face hub is checked, too (:func:`checked_copy`).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from pyarrow import fs

from pipelines.object_store import BLOCK_BYTES
from pipelines.ranges import ByteRange, RangeReader
from pipelines.storage import compute_digest, resolve

_VARIABLE = "TEMPNET_MODELS"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")
# Nothing here reads these subdirectories of a model: its repository, checkpoints of its training, and other formats.
_UNREAD = re.compile(r"\..*|checkpoint-.*|onnx|openvino")
_NUM_LISTINGS = 3


class _Listing(NamedTuple):
    """What lies at a URI: path relative to `path` → file, in alphabetical order; a single file has the path "."."""

    filesystem: fs.FileSystem
    path: str
    files: dict[str, fs.FileInfo]

    @property
    def digest(self) -> str:
        """Hash of names, sizes and times of modification, as 16 hex digits."""
        return compute_digest([[name, file.size, file.mtime_ns] for name, file in self.files.items()])


def local_copy(source: str, *, with_weights: bool = True, cache: Path | None = None) -> str:
    """Return the path on this machine of what lies at a URI, which is copied unless this was done before.

    Of a local path `~` is expanded, and the name of a model on the hub is returned unchanged. Of a directory, its repository
    (`.git`), checkpoints (`checkpoint-…`), exports for other programs (`onnx`, `openvino`) and without `with_weights` its
    weights are left out. `cache` is where copies are kept, in the place of $TEMPNET_MODELS.

    Raises:
        ValueError: if there is nothing at the URI, it cannot be read, or a file's name would lead out of the directory.
        OSError: if the files cannot be copied, for example because the disk is too small.
    """
    if "://" not in source:
        return os.path.expanduser(source)
    for _ in range(_NUM_LISTINGS):
        listing = _list(source, with_weights)
        if isinstance(listing.filesystem, fs.LocalFileSystem):
            return listing.path
        kept = cache or Path(os.environ.get(_VARIABLE) or "~/.cache/tempnet").expanduser().absolute()
        directory = kept / compute_digest([source.rstrip("/"), with_weights])
        version = directory / listing.digest
        place = version / listing.path.lstrip("/")
        if version.is_dir():
            return str(place)
        with _locked(directory, "lock"):
            if version.is_dir():
                return str(place)
            for old in directory.glob("*/"):  # what a killed process has left, and what the source was before
                shutil.rmtree(old)
            num_bytes, free = sum(file.size for file in listing.files.values()), shutil.disk_usage(directory).free
            if num_bytes > free:
                raise OSError(
                    f"{source} takes {num_bytes / 2**30:.2f} GiB, and {kept} has {free / 2**30:.2f} GiB left: make room "
                    f"there, or set {'TMPDIR' if cache else _VARIABLE} to a directory on another disk"
                )
            partial = Path(tempfile.mkdtemp(prefix="partial-", dir=directory))
            try:
                _copy(listing, partial / listing.path.lstrip("/"))
                if _list(source, with_weights).digest == listing.digest:
                    partial.rename(version)
                    return str(place)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    raise OSError(f"{source} was written to each of the {_NUM_LISTINGS} times that it was copied: try again later")


@contextmanager
def shared_copy(source: str) -> Iterator[str]:
    """Yield what :func:`local_copy` returns; a copy in $TMPDIR is deleted when the last process of this machine leaves.

    For what is read once, such as a checkpoint, by all workers of a machine at the same time.
    """
    if "://" not in source:
        yield local_copy(source)
        return
    cache = Path(tempfile.gettempdir()) / f"tempnet-shared-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if cache.lstat().st_uid != os.getuid():  # whoever made it could change what is read from it
        raise PermissionError(f"{cache} belongs to another user: remove it, or set TMPDIR to another directory")
    with _locked(cache, compute_digest(source), fcntl.LOCK_SH) as lock:
        copies = cache / f"copies-{compute_digest(source)}"
        try:
            yield local_copy(source, cache=copies)
        finally:
            with suppress(BlockingIOError):  # another process reads the copy, and will delete it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(copies, ignore_errors=True)


def is_directory(source: str) -> bool:
    """Return whether a path or URI is that of a directory; False also if the URI cannot be read."""
    try:
        filesystem, path = resolve(source)
        return bool(filesystem.get_file_info(path).type == fs.FileType.Directory)
    except OSError:
        return False


def _list(uri: str, with_weights: bool) -> _Listing:
    try:
        filesystem, path = resolve(uri)
        there = filesystem.get_file_info(path)
        found = [there]
        if there.type == fs.FileType.Directory:
            found = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{uri!r} cannot be read: check bucket, endpoint, region and credentials on this machine. {reason}"
        ) from error
    if there.type == fs.FileType.NotFound:
        raise ValueError(f"{uri!r} is missing: there is no such file or directory, or no such bucket")
    files: dict[str, fs.FileInfo] = {}
    for file in sorted(found, key=lambda file: file.path):
        if file.type != fs.FileType.File:
            continue
        if {"", ".", ".."} & set(file.path.lstrip("/").split("/")):
            raise ValueError(f"{uri!r} holds {file.path!r}, which is no name of a file: rename or delete it")
        name = "." if file is there else file.path.removeprefix(f"{path}/")
        *parents, _ = name.split("/")
        is_read = not any(map(_UNREAD.fullmatch, parents)) and (with_weights or not name.endswith(_WEIGHTS))
        if is_read or file is there:
            files[name] = file
    return _Listing(filesystem, path, files)


def _copy(listing: _Listing, to: Path) -> None:
    reader = RangeReader(listing.filesystem)
    (to.parent if "." in listing.files else to).mkdir(parents=True)
    for name, file in listing.files.items():
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as stream:
            starts = range(0, file.size, BLOCK_BYTES)
            ranges = [ByteRange(file.path, start, min(BLOCK_BYTES, file.size - start)) for start in starts]
            stream.writelines(reader.stream(ranges))
            if stream.tell() != file.size:
                raise OSError(f"{file.path} ended after {stream.tell()} of its {file.size} bytes")


@contextmanager
def _locked(directory: Path, name: str, operation: int = fcntl.LOCK_EX) -> Iterator[IO[str]]:
    """Let one process of this machine at a time into the block, or with LOCK_SH several; a killed process holds no lock."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / name).open("w") as file:
        fcntl.flock(file, operation)
        yield file


_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SECONDS_TO_ANSWER = 5
# If a model or a tokenizer is in the local cache of the hub, so is at least one of these files.
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def checked_copy(source: str, field: str, *, with_weights: bool = True) -> str:
    """Return what Transformers can load a model or tokenizer from: a path on this machine, or a hub name."""
    try:
        place = local_copy(source, with_weights=with_weights)
        check_source(place)
    except ValueError as error:
        raise ValueError(f"{field}{error}") from error
    return place


def check_source(source: str) -> None:
    """Raise ValueError for a local path that does not exist, and a hub name that is not cached if the hub cannot be reached.

    Transformers takes a missing path for a hub name, and without a network keeps asking the hub for half a minute.
    """
    path = Path(source)
    if path.exists():
        return
    if (
        not _HUB_NAME.fullmatch(source)
        or source.startswith(".")
        or (len(path.parts) > 1 and Path(path.parts[0]).is_dir())
    ):
        raise ValueError(f"{source!r} is missing: there is no such file or directory")
    _check_hub(source)


def _check_hub(name: str) -> None:
    # Imported here because it comes with Transformers, and processes that only receive a pickled tokenizer need
    # neither.
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE:
        return
    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=_SECONDS_TO_ANSWER):
            pass
    except urllib.error.HTTPError:
        pass  # An HTTP error is still an answer: the hub can be reached.
    except OSError as error:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES):
            # Otherwise the hub's client asks again and again, for every file, before it takes what is in the cache.
            constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"
            print(f"the hub at {constants.ENDPOINT} does not answer: {name} is read from its cache here", flush=True)
            return
        raise ValueError(
            f"{name!r} is no local directory, and the hub at {constants.ENDPOINT} cannot be reached from here: give the "
            "path of a directory"
        ) from error
