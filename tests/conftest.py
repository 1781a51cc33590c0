"""Set up all tests. Ray reads its settings once, so they are made here, before any test module imports it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from s3_support import ObjectStore, run_object_store

# No test has a time limit per example, because a busy machine may be slow and no test measures speed.
settings.register_profile("gate", deadline=None, max_examples=20)
settings.register_profile("nightly", deadline=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))
# A shell lets the processes of its background ignore Ctrl-C; tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Run an S3 server, and yield it; the environment of this process stays as it is."""
    with run_object_store(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture
def bucket(s3_server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of an empty bucket that this process can use, with an empty cache of copies."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TEMPNET_MODELS", str(tmp_path / "cache"))
    return s3_server.create_bucket()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Yield a function that mounts a file system of some megabytes, or skips the test where none can be mounted."""
    at = tmp_path / "disk"

    def mount(megabytes: int) -> Path:
        at.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(at)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
        return at

    yield mount
    if at.is_mount():
        # A process of the test may still use the file system.
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a few hundred documents of a small language with structure to learn (`support.write_corpus`)."""
    from support import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a hundred rendered images with captions, a split for retrieval and one for classification."""
    from task_support import write_tiny_images

    return write_tiny_images(tmp_path_factory.mktemp("clip") / "images")


@pytest.fixture(scope="session")
def wordpiece(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a WordPiece tokenizer for encoders on the corpus, and return its directory."""
    from support import corpus_lines

    from pipelines.text.tokenization import train_wordpiece

    directory = tmp_path_factory.mktemp("wordpiece")
    train_wordpiece((json.loads(line)["text"] for line in corpus_lines(corpus)), 400).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def home_directory(corpus: Path, wordpiece: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory like that of a reader of the README, with the tests' data in the places of the sample data."""
    home = tmp_path_factory.mktemp("home")
    (home / "data" / "sample").mkdir(parents=True)
    places = {"text": corpus, "tokenizer": corpus / "tokenizer", "wordpiece": wordpiece, "images": images}
    for name, directory in places.items():
        (home / "data" / "sample" / name).symlink_to(directory)
    code = home / "data" / "sample" / "code"
    code.mkdir()
    texts = (f"def f{n}(x):\n    return x + {n}\n" * 20 for n in range(20))
    (code / "code.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (home / "README.md").symlink_to(Path(__file__).parents[1] / "README.md")
    return home
