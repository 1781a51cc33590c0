"""Images from an S3 server that is far away, beside the same images on a local disk.

    python -m benchmarks.object_store

The server is moto on loopback behind a proxy that answers after `latency` seconds with `megabytes_per_second` for all
connections together. An epoch of training pairs is read by `PairSource`, window by window, with a cold cache of the node's
own in every round, beside an epoch of the same tars read locally: images per second in a round (rounds alternate, so that
both meet the same load of the machine), bytes that the server sent over the bytes of the tars, and bytes per request.
"first" is the time to the first batch, for which a whole window has to come, and is not part of the speed; "CPU" is the
ratio of images per second of the reading process's computing time, which other load does not change as much.
The first row has the requests of indexing the tars, as the preparation of training does. The peers are `webdataset`,
which reads each tar as one stream by curl (in a process of its own), and, where it is installed, MosaicML Streaming
(`benchmarks.mosaic_peer`), each against its own local speed. The line below each is our images per second from S3 over the
peer's, of epochs that are read in turn: after the first batch, and of the whole epoch with the wait for its first batch.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import moto
import numpy as np
import pyarrow as pa
import torch
import tyro
import webdataset
from PIL import Image
from transformers import PreTrainedTokenizerFast

from benchmarks import mosaic_peer
from benchmarks.image_pipeline import Arguments, generate, make_webdataset_loader, prepare
from pipelines.block_cache import DIRECTORY_VARIABLE
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.plan import StreamPlan
from pipelines.ranges import range_reader
from pipelines.text.tokenization import train_bpe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
from s3_support import Counts, ObjectStore, run_object_store

SPEED, BYTES, BYTES_PER_GET = 0.95, 1.05, 8e6


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
    with_peers: bool = True
    """Whether webdataset, and MosaicML Streaming where it is installed, are measured too."""

    @property
    def line(self) -> dict[str, Any]:
        """What the proxy is told (`s3_support.Behaviour`)."""
        return {
            "latency": self.latency,
            "bytes_per_second": self.megabytes_per_second * 1e6,
            "remembers": True,
        }


def epoch(
    manifest: ImageManifest, tokenizer: PreTrainedTokenizerFast, settings: Settings, number: int
) -> Iterator[Any]:
    """Yield the batches of an epoch as `pipelines.stream.RankStream` reads them, without Ray."""
    source = PairSource(manifest=manifest, tokenizer=tokenizer, image_size=settings.image_size, cache_bytes=2**30)
    plan = StreamPlan(shard_sizes=manifest.shard_sizes, seed=0, window_size=settings.window)
    windows = list(plan.windows(number * manifest.num_pairs, (number + 1) * manifest.num_pairs))
    for index, window in enumerate(windows):
        later = windows[index + 1].shards if index + 1 < len(windows) else ()
        source.read_ahead(window.shards, later)
        for start in range(window.start, window.stop, settings.batch_size):
            places = np.arange(start, min(start + settings.batch_size, window.stop))
            yield source.read(*plan.locate(window, places), number)


def webdataset_epoch(
    tars: list[str], tokenizer: PreTrainedTokenizerFast, settings: Settings, number: int
) -> Iterator[Any]:
    """Yield the batches of an epoch of webdataset, with the same views; all epochs are alike."""
    arguments = Arguments(image_size=settings.image_size, batch_size=settings.batch_size)
    batches = make_webdataset_loader(tars, tokenizer, arguments, with_draft=True)
    for _ in range(settings.num_images // settings.batch_size):
        yield next(batches)


def speed(batches: Iterator[Any]) -> tuple[float, float, float]:
    """Return the seconds until the first batch, the images per second after it, and per second of computing time."""
    started = time.perf_counter()
    next(batches)
    first, used = time.perf_counter(), time.process_time()
    num_images = sum(len(batch["images"]) for batch in batches)
    return first - started, num_images / (time.perf_counter() - first), num_images / (time.process_time() - used)


def describe(counts: Counts, num_bytes: int) -> str:
    """Return the bytes and requests of an epoch as text."""
    per_get = counts.num_bytes / 1e6 / max(counts.num_gets, 1)
    return f"{counts.num_bytes / num_bytes:>8.3f}{per_get:>10.2f}{counts.num_gets:>7}"


def measure(
    local: Callable[[int], Iterator[Any]],
    remote: Callable[[int], Iterator[Any]],
    store: ObjectStore,
    settings: Settings,
) -> tuple[str, Counts]:
    """Measure epochs side by side; return the speeds as text, and the requests of the last remote epoch."""
    rows, counts = [], Counts()
    for number in range(settings.num_rounds + 1):
        near = speed(local(number))
        far, counts = speed_far(remote(number), store, settings)
        if number:  # in the first round the proxy learns its answers
            rows.append((near[1], far[1], far[1] / near[1], far[2] / near[2], far[0]))
    near_speed, far_speed, ratio, computing, wait = (statistics.median(column) for column in zip(*rows, strict=True))
    spread = f"  ({min(row[2] for row in rows):.3f} to {max(row[2] for row in rows):.3f})"
    return f"{near_speed:>8.1f}{far_speed:>8.1f}{ratio:>10.3f}{spread:<18}{computing:>8.3f}{wait:>10.2f}", counts


def speed_far(batches: Iterator[Any], store: ObjectStore, settings: Settings) -> tuple[tuple[float, ...], Counts]:
    """Return what `speed` returns of an epoch from the server, and its requests; our cache is empty before."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ[DIRECTORY_VARIABLE] = cache
        range_reader.cache_clear()
        store.behave(**settings.line)
        return speed(batches), store.counts()


def compare(
    ours: Callable[[int], Iterator[Any]],
    peer: Callable[[int], Iterator[Any]],
    store: ObjectStore,
    settings: Settings,
) -> str:
    """Return our images per second from the server over a peer's as text."""
    ratios = []
    for number in range(settings.num_rounds):
        (first, rate, _), (peer_first, peer_rate, _) = (
            speed_far(form(number), store, settings)[0] for form in (ours, peer)
        )
        num_left = settings.num_images - settings.batch_size
        ratios.append((rate / peer_rate, (peer_first + num_left / peer_rate) / (first + num_left / rate)))
    return ", ".join(
        f"{name} {statistics.median(column):.3f} ({min(column):.3f} to {max(column):.3f})"
        for name, column in zip(("after the first batch", "of the epoch"), zip(*ratios, strict=True), strict=True)
    )


def measure_peers(
    tars: list[Path],
    ours: Callable[[int], Iterator[Any]],
    tokenizer: PreTrainedTokenizerFast,
    store: ObjectStore,
    settings: Settings,
    scratch: Path,
) -> None:
    """Measure the peers and print their rows, and our images per second from the server over theirs."""
    urls = [f"{store.endpoint}/bucket/data/{tar.name}" for tar in tars]
    near = partial(webdataset_epoch, list(map(str, tars)), tokenizer, settings)
    far = partial(webdataset_epoch, urls, tokenizer, settings)
    text, counts = measure(near, far, store, settings)
    print(f"{'webdataset, images/s':<24}{describe(counts, sum(tar.stat().st_size for tar in tars))}{text}", flush=True)
    print(f"  PairSource / webdataset, from S3: {compare(ours, far, store, settings)}", flush=True)
    if not (version := mosaic_peer.version()):
        print("MosaicML Streaming is not installed; `benchmarks.mosaic_peer` says how")
        return
    num_bytes = mosaic_peer.write_shards(tars, scratch / "mds")
    store.upload(scratch / "mds", "bucket/mds")
    os.environ["S3_ENDPOINT_URL"] = store.endpoint

    def mosaic_epoch(remote: str | None, number: int) -> Iterator[Any]:
        cache = tempfile.mkdtemp(dir=scratch) if remote else str(scratch / "mds")
        return mosaic_peer.epoch(remote, cache, tokenizer, settings.image_size, settings.batch_size)

    far = partial(mosaic_epoch, "s3://bucket/mds")
    text, counts = measure(partial(mosaic_epoch, None), far, store, settings)
    print(f"{f'Mosaic {version}, images/s':<24}{describe(counts, num_bytes)}{text}", flush=True)
    print(f"  PairSource / MosaicML Streaming, from S3: {compare(ours, far, store, settings)}", flush=True)


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
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, pyarrow {pa.__version__}, Pillow {Image.__version__}, moto "
            f"{moto.__version__}, webdataset {webdataset.__version__}\n{settings.num_images} images, shorter side "
            f"{settings.stored_size}, {num_bytes / settings.num_images / 1024:.0f} KiB each, in {len(tars)} tars of "
            f"{num_bytes / 1e6 / len(tars):.0f} MB; views of {settings.image_size}, windows of {settings.window}; "
            f"{settings.latency * 1000:.0f} ms a request, {settings.megabytes_per_second:g} MB/s\n"
            f"{'':<24}{'bytes':>8}{'MB/GET':>10}{'GETs':>7}{'local':>8}{'S3':>8}{'S3/local':>10}{'':<18}"
            f"{'CPU':>8}{'first, s':>10}"
        )
        tokenizer = train_bpe([f"word{number}" for number in range(200)], 512)
        tokenizer.pad_token = tokenizer.eos_token
        local = prepare(str(data), f"{scratch}/local")
        store.behave(**settings.line)
        remote = prepare("s3://bucket/data", f"{scratch}/remote")
        assert remote.digest == local.digest
        print(f"{'indexing':<24}{describe(store.counts(), num_bytes)}", flush=True)
        ours = partial(epoch, remote, tokenizer, settings)
        text, counts = measure(partial(epoch, local, tokenizer, settings), ours, store, settings)
        print(f"{'PairSource, images/s':<24}{describe(counts, num_bytes)}{text}", flush=True)
        if settings.with_peers:
            measure_peers(tars, ours, tokenizer, store, settings, Path(scratch))
    print(f"targets: S3/local at least {SPEED}, bytes at most {BYTES}, at least {BYTES_PER_GET / 1e6:g} MB/GET")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
