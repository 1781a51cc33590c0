"""Images from an S3 server that is far away, beside the same images on a local disk.

    python -m benchmarks.object_store

The server is moto on loopback behind a proxy that answers after `latency` seconds with `megabytes_per_second` for all
connections together. `PairSource` reads an epoch of training pairs with a cold cache, in turn with an epoch of the same tars
read locally: images per second, bytes that the server sent over those of the tars, and bytes per request. "first" is the
time to the first batch, which is not part of the speed. The peer is `webdataset`, which reads each tar as one stream by
curl. The line above the table is our images per second from S3 over the peer's: after the first batch, and of the epoch.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import PreTrainedTokenizerFast

from benchmarks.image_pipeline import generate, make_tokenizer, make_webdataset_loader, prepare, read_epoch
from benchmarks.measure import print_setting, print_table, spread
from pipelines.block_cache import DIRECTORY_VARIABLE
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.ranges import range_reader

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
from s3_support import Counts, ObjectStore, run_object_store

TARGET = ["target", "1.05", "8", "", "", "0.95", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    num_images: int = 2048
    stored_size: int = 384
    """Shorter side of the generated images, in pixels."""
    image_size: int = 224
    batch_size: int = 64
    window: int = 512
    """Number of pairs of a window; the tars have 512 each."""
    latency: float = 0.03
    megabytes_per_second: float = 100.0
    num_rounds: int = 5


def epoch(
    manifest: ImageManifest, tokenizer: PreTrainedTokenizerFast, settings: Settings, number: int
) -> Iterator[Any]:
    """Yield the batches of an epoch from a source of its own."""
    source = PairSource(manifest=manifest, tokenizer=tokenizer, image_size=settings.image_size, cache_bytes=2**30)
    yield from read_epoch(source, settings.batch_size, settings.window, number)


def webdataset_epoch(
    tars: list[str], tokenizer: PreTrainedTokenizerFast, settings: Settings, number: int
) -> Iterator[Any]:
    """Yield the batches of an epoch of webdataset, with the same views; all epochs are alike."""
    batches = make_webdataset_loader(tars, tokenizer, settings.image_size, settings.batch_size)
    for _ in range(settings.num_images // settings.batch_size):
        yield next(batches)


def speed(batches: Iterator[Any]) -> tuple[float, float]:
    """Return the seconds until the first batch, and the images per second after it."""
    started = time.perf_counter()
    next(batches)
    first = time.perf_counter()
    num_images = sum(len(batch["images"]) for batch in batches)
    return first - started, num_images / (time.perf_counter() - first)


Epoch = Callable[[int], Iterator[Any]]
"""Number → batches of that epoch."""


def measure(local: Epoch, remote: Epoch, num_bytes: int, store: ObjectStore, settings: Settings) -> list[str]:
    """Measure epochs side by side; return requests, speeds and ratios as cells."""
    rows, counts = [], Counts()
    for number in range(settings.num_rounds + 1):
        _, near = speed(local(number))
        (wait, far), counts = speed_far(remote(number), store, settings)
        if number:  # in the first round the proxy learns its answers
            rows.append((near, far, far / near, wait))
    near, far, _, wait = (statistics.median(column) for column in zip(*rows, strict=True))
    sent = [f"{counts.num_bytes / num_bytes:.3f}", f"{counts.num_bytes / 1e6 / max(counts.num_gets, 1):.2f}"]
    return [*sent, f"{near:.1f}", f"{far:.1f}", spread([row[2] for row in rows]), f"{wait:.2f}"]


def speed_far(batches: Iterator[Any], store: ObjectStore, settings: Settings) -> tuple[tuple[float, float], Counts]:
    """Return what `speed` returns of an epoch from the server, and its requests; our cache is empty before."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ[DIRECTORY_VARIABLE] = cache
        range_reader.cache_clear()
        line = {"latency": settings.latency, "bytes_per_second": settings.megabytes_per_second * 1e6}
        store.behave(**line, remembers=True)
        return speed(batches), store.counts()


def compare(ours: Epoch, peer: Epoch, store: ObjectStore, settings: Settings) -> str:
    """Return our images per second from the server over a peer's as text."""
    ratios = []
    for number in range(settings.num_rounds):
        (first, rate), _ = speed_far(ours(number), store, settings)
        (peer_first, peer_rate), _ = speed_far(peer(number), store, settings)
        num_left = settings.num_images - settings.batch_size
        ratios.append((rate / peer_rate, (peer_first + num_left / peer_rate) / (first + num_left / rate)))
    after_first, of_epoch = (spread(column) for column in zip(*ratios, strict=True))
    return f"after the first batch {after_first}, of the epoch {of_epoch}"


def main(settings: Settings) -> None:
    """Run the benchmark and print the results."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, run_object_store(Path(scratch, "log")) as store:
        os.environ |= store.environment
        data = Path(scratch, "data")
        for name in ("data", "local", "remote"):
            Path(scratch, name).mkdir()
        generate(data, settings.num_images, settings.stored_size)
        store.upload(data, "bucket/data")
        tars = sorted(data.iterdir())
        num_bytes = sum(tar.stat().st_size for tar in tars)
        print_setting(settings, "pyarrow", "pillow", "moto", "webdataset")
        print(f"{len(tars)} tars of {num_bytes / 1e6 / len(tars):.0f} MB")
        tokenizer = make_tokenizer()
        local = prepare(str(data), f"{scratch}/local")
        remote = prepare("s3://bucket/data", f"{scratch}/remote")
        assert remote.digest == local.digest
        near, far = (partial(epoch, manifest, tokenizer, settings) for manifest in (local, remote))
        rows = [TARGET, ["PairSource", *measure(near, far, num_bytes, store, settings)]]
        peer_near = partial(webdataset_epoch, [str(tar) for tar in tars], tokenizer, settings)
        urls = [f"{store.endpoint}/bucket/data/{tar.name}" for tar in tars]
        peer_far = partial(webdataset_epoch, urls, tokenizer, settings)
        rows.append(["webdataset, curl", *measure(peer_near, peer_far, num_bytes, store, settings)])
        print(f"PairSource / webdataset, from S3: {compare(far, peer_far, store, settings)}", flush=True)
    print_table(["", "bytes", "MB/GET", "local, images/s", "S3, images/s", "S3/local", "first, s"], rows)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
