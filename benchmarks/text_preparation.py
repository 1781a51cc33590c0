"""Preparing one tar of `.jsonl.zst` members, as OpenWebText2 is published: one and two readers, and the tokenizer alone.

    .venv/bin/python -m benchmarks.text_preparation [--megabytes 200] [--num-rounds 1]

The tar is made from the sample text, whose documents are repeated in another order until the tar has its size. A reader
is a Ray Data task with one CPU: it decompresses, parses, tokenises, packs and writes. The tokenizer alone encodes the
documents of a few members that are already in memory, on one thread, in the same groups of documents, before and after the
one reader. Two tokenizers at once, in two processes, show what the machine's second core is worth. "CPU" are the same
ratios of computing time, of all processes of Ray together, which other load of the machine changes less. The first line
sets a reader without Ray, part by part, beside the tokenizer alone on the documents of the part, by computing time.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
import tyro
import zstandard
from tokenizers import Tokenizer

from jobs.engine.cluster import listen_on_loopback
from pipelines.archives import list_archives
from pipelines.text.packing import PackingConfig
from pipelines.text.prepare import PrepareConfig, PreparedTarget, prepare_text
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


def time_tokenizers(num_processes: int, arguments: Arguments) -> tuple[float, float]:
    """Return the million characters per second of so many tokenizers at once, each alone on a thread of a process of its own.

    Returns:
        The rates of all processes together, and the mean of their rates per second of computing time.
    """
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        rates = list(pool.map(_time_tokenizer, [arguments] * num_processes))
    return sum(rate for rate, _ in rates), sum(rate for _, rate in rates) / num_processes


def _time_tokenizer(arguments: Arguments) -> tuple[float, float]:
    """Return the million characters per second that the tokenizer encodes on one thread, and per second of computing time."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    backend = load_tokenizer(arguments.tokenizer).backend_tokenizer
    members = list(itertools.islice(repeat(read_texts(arguments.source)), 3))
    encode(backend, members[0])  # to warm up
    started, used = time.perf_counter(), time.process_time()
    for member in members[1:]:
        encode(backend, member)
    millions = sum(len(text) for member in members[1:] for text in member) / 1e6
    return millions / (time.perf_counter() - started), millions / (time.process_time() - used)


def encode(backend: Tokenizer, texts: list[str]) -> None:
    """Encode texts in the groups in which preparation does."""
    for at in range(0, len(texts), _NUM_DOCUMENTS_PER_ENCODE):
        backend.encode_batch_fast(texts[at : at + _NUM_DOCUMENTS_PER_ENCODE], add_special_tokens=False)


def compare_in_turn(source: Path, arguments: Arguments, root: Path, num_parts: int = 4) -> tuple[float, float, float]:
    """Prepare parts of the tar in this process, in turn with the tokenizer alone on the same documents.

    Returns:
        The median, the least and the largest share of the tokenizer alone in the computing time of a part.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    layout = PackingConfig.for_tokenizer(load_tokenizer(arguments.tokenizer), arguments.context_length)
    target = PreparedTarget.locate(PrepareConfig(source=str(source), tokenizer=arguments.tokenizer), layout, str(root))
    task, shares = target.make_task(), []
    for number, part in enumerate(task.parts[: num_parts + 1]):
        texts = [
            item.text
            for item in read_documents(str(source), part.archive, part=part.part)
            if isinstance(item, Document)
        ]
        started = time.process_time()
        encode(task.tokenizer, texts)
        alone = time.process_time() - started
        started = time.process_time()
        task.run(number)
        if number:  # The first one warms up.
            shares.append(alone / (time.process_time() - started))
    shutil.rmtree(root)
    return statistics.median(shares), min(shares), max(shares)


def time_readers(num_readers: int, source: Path, arguments: Arguments, root: Path) -> tuple[float, float, str]:
    """Prepare the tar with so many readers.

    Returns:
        The seconds without Ray's start, the seconds of computing time of all processes of Ray, and the result's digest.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # as `jobs.engine.cluster` sets it
    listen_on_loopback()
    ray.init(
        address="local", num_cpus=num_readers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
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


def run_round(tar: Path, millions: float, arguments: Arguments, directory: Path) -> None:
    """Measure once, and print; `millions` is the number of characters in the tar in units of 10⁶."""
    median, least, most = compare_in_turn(tar, arguments, directory / "turn")
    print(f"in turn, in one process: a reader is {median:.3f} ({least:.3f} to {most:.3f}) of the tokenizer", flush=True)
    before, before_cpu = time_tokenizers(1, arguments)
    one, one_cpu, digest = time_readers(1, tar, arguments, directory / "one")
    after, after_cpu = time_tokenizers(1, arguments)
    two, two_cpu, other = time_readers(2, tar, arguments, directory / "two")
    pair, _ = time_tokenizers(2, arguments)
    assert digest == other
    alone, alone_cpu = (before + after) / 2, (before_cpu + after_cpu) / 2
    print(
        f"million characters/s: tokenizer alone {before:.2f} and {after:.2f}, two at once {pair:.2f}, one reader "
        f"{millions / one:.2f} ({one:.0f} s), two {millions / two:.2f} ({two:.0f} s)\n"
        f"one reader / the tokenizer {millions / one / alone:.3f}, CPU {millions / one_cpu / alone_cpu:.3f}\n"
        f"two readers / one {one / two:.3f}, CPU {2 * one_cpu / two_cpu:.3f}; two tokenizers / one {pair / alone:.3f}\n"
        f"digest {digest}",
        flush=True,
    )


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
            run_round(tar, num_characters / 1e6, arguments, Path(directory))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
