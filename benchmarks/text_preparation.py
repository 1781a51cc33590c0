"""Preparing one tar of `.jsonl.zst` members, as OpenWebText2 is published: one and two readers, and the tokenizer alone.

    .venv/bin/python -m benchmarks.text_preparation [--megabytes 200] [--num-rounds 1]

The tar is made from the sample text, whose documents are repeated in another order until the tar has its size. A reader
is a Ray Data task with one CPU: it decompresses, parses, tokenises, packs and writes. The tokenizer alone encodes the
documents of a few members that are already in memory, on one thread, in the same groups of documents. "CPU" are the same
ratios of computing time, of all processes of Ray together, which other load of the machine changes less.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import random
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
import tyro
import zstandard

from pipelines.archives import list_archives
from pipelines.text.packing import PackingConfig
from pipelines.text.prepare import PrepareConfig, prepare_text
from pipelines.text.reading import Document, read_documents
from pipelines.text.tokenization import load_tokenizer

_MEMBER_CHARACTERS = 16 * 10**6
_NUM_DOCUMENTS_PER_ENCODE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Size of the tar, and what it is made from."""

    megabytes: int = 200
    """Size of the tar in units of 10⁶ bytes."""
    num_rounds: int = 1
    """Number of times that one and two readers are timed in turn."""
    source: str = "data/sample/text/train"
    """Text that the tar is made from."""
    tokenizer: str = "data/sample/tokenizer"
    """Directory of the tokenizer."""
    context_length: int = 1024
    """Number of tokens per block."""


def read_texts(source: str) -> list[str]:
    """Return the texts of all documents of a source."""
    items = (item for archive in list_archives(source) for item in read_documents(source, archive))
    return [item.text for item in items if isinstance(item, Document)]


def repeat(texts: list[str]) -> Iterator[list[str]]:
    """Yield the texts of one member after the other, in another order in every repetition."""
    rng = random.Random(0)
    member: list[str] = []
    num_characters = 0
    while True:
        for text in rng.sample(texts, len(texts)):
            member.append(text)
            num_characters += len(text)
            if num_characters >= _MEMBER_CHARACTERS:
                yield member
                member, num_characters = [], 0


def write_tar(path: Path, texts: list[str], num_bytes: int) -> tuple[int, int]:
    """Write members until the tar has its size; return their number and the number of characters in them."""
    num_members = num_characters = 0
    with tarfile.open(path, "w") as archive:
        for member in repeat(texts):
            lines = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in member)
            data = zstandard.ZstdCompressor(level=3).compress(lines.encode())
            info = tarfile.TarInfo(f"{num_members}.jsonl.zst")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
            num_members += 1
            num_characters += sum(map(len, member))
            if archive.offset >= num_bytes:
                return num_members, num_characters
    raise AssertionError


def time_tokenizer(texts: list[str], tokenizer: str) -> tuple[float, float]:
    """Return the characters per second that the tokenizer encodes on one thread, and per second of computing time."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    backend = load_tokenizer(tokenizer).backend_tokenizer
    members = list(itertools.islice(repeat(texts), 3))
    started = used = 0.0
    for number, member in enumerate(members):
        if number == 1:  # the first one warms up
            started, used = time.perf_counter(), time.process_time()
        for at in range(0, len(member), _NUM_DOCUMENTS_PER_ENCODE):
            backend.encode_batch_fast(member[at : at + _NUM_DOCUMENTS_PER_ENCODE], add_special_tokens=False)
    num_characters = sum(len(text) for member in members[1:] for text in member)
    return num_characters / (time.perf_counter() - started), num_characters / (time.process_time() - used)


def time_readers(num_readers: int, source: Path, arguments: Arguments, root: Path) -> tuple[float, float, str]:
    """Prepare the tar with so many readers.

    Returns:
        The seconds without Ray's start, the seconds of computing time of all processes of Ray, and the result's digest.
    """
    ray.init(num_cpus=num_readers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        layout = PackingConfig.for_tokenizer(load_tokenizer(arguments.tokenizer), arguments.context_length)
        config = PrepareConfig(source=str(source), tokenizer=arguments.tokenizer)
        ray.get([ray.remote(read_texts).remote(arguments.source) for _ in range(num_readers)])  # starts the workers
        started, used = time.perf_counter(), seconds_of_children()
        manifest = prepare_text(config, layout, str(root))
        seconds = time.perf_counter() - started
        return seconds, seconds_of_children() - used, f"{manifest.digest}, {manifest.num_tokens:,} tokens"
    finally:
        ray.shutdown()
        shutil.rmtree(root, ignore_errors=True)


def seconds_of_children() -> float:
    """Return the computing time of all processes that this one has started, directly or not, ended ones included."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def main(arguments: Arguments) -> None:
    """Measure and print."""
    texts = read_texts(arguments.source)
    with tempfile.TemporaryDirectory() as directory:
        tar = Path(directory) / "text.jsonl.zst.tar"
        num_members, num_characters = write_tar(tar, texts, arguments.megabytes * 10**6)
        print(
            f"{tar.stat().st_size / 1e6:.0f} MB in {num_members} members, {num_characters / 1e6:.0f} million characters; "
            f"ray {ray.__version__}, {os.cpu_count()} cores",
            flush=True,
        )
        for _ in range(arguments.num_rounds):
            alone, alone_cpu = time_tokenizer(texts, arguments.tokenizer)
            one, one_cpu, digest = time_readers(1, tar, arguments, Path(directory) / "one")
            two, two_cpu, other = time_readers(2, tar, arguments, Path(directory) / "two")
            assert digest == other
            own_cpu = num_characters / one_cpu / alone_cpu
            print(
                f"tokenizer alone {alone / 1e6:.2f}, one reader {num_characters / one / 1e6:.2f} ({one:.0f} s), two "
                f"{num_characters / two / 1e6:.2f} ({two:.0f} s) million characters/s: one reader is "
                f"{num_characters / one / alone:.3f} of the tokenizer (CPU {own_cpu:.3f}), two are "
                f"{one / two:.3f} times one (CPU {2 * one_cpu / two_cpu:.3f}); digest {digest}",
                flush=True,
            )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
