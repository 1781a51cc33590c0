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
(`benchmarks.mosaic_peer`), each against its own local speed. A line for each is our images per second from S3 over the
peer's, of epochs that are read in turn: after the first batch, and of the whole epoch with the wait for its first batch.
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

from benchmarks import mosaic_peer
from benchmarks.image_pipeline import generate, make_tokenizer, make_webdataset_loader, prepare, read_epoch
from benchmarks.measure import print_setting, print_table, spread
from pipelines.block_cache import DIRECTORY_VARIABLE
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.ranges import range_reader

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
        return {"latency": self.latency, "bytes_per_second": self.megabytes_per_second * 1e6, "remembers": True}


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
    batches = make_webdataset_loader(tars, tokenizer, settings.image_size, settings.batch_size, with_draft=True)
    for _ in range(settings.num_images // settings.batch_size):
        yield next(batches)


def speed(batches: Iterator[Any]) -> tuple[float, float, float]:
    """Return the seconds until the first batch, the images per second after it, and per second of computing time."""
    started = time.perf_counter()
    next(batches)
    first, used = time.perf_counter(), time.process_time()
    num_images = sum(len(batch["images"]) for batch in batches)
    return first - started, num_images / (time.perf_counter() - first), num_images / (time.process_time() - used)


def describe(counts: Counts, num_bytes: int) -> list[str]:
    """Return the bytes and requests of an epoch as cells."""
    per_get = counts.num_bytes / 1e6 / max(counts.num_gets, 1)
    return [f"{counts.num_bytes / num_bytes:.3f}", f"{per_get:.2f}", f"{counts.num_gets}"]


Epoch = Callable[[int], Iterator[Any]]
"""Number → batches of that epoch."""


def measure(local: Epoch, remote: Epoch, num_bytes: int, store: ObjectStore, settings: Settings) -> list[str]:
    """Measure epochs side by side; return requests, speeds and ratios as cells."""
    rows, counts = [], Counts()
    for number in range(settings.num_rounds + 1):
        near = speed(local(number))
        far, counts = speed_far(remote(number), store, settings)
        if number:  # in the first round the proxy learns its answers
            rows.append((near[1], far[1], far[1] / near[1], far[2] / near[2], far[0]))
    near_speed, far_speed, _, computing, wait = (statistics.median(column) for column in zip(*rows, strict=True))
    ratio = spread([row[2] for row in rows])
    return [
        *describe(counts, num_bytes),
        f"{near_speed:.1f}",
        f"{far_speed:.1f}",
        ratio,
        f"{computing:.3f}",
        f"{wait:.2f}",
    ]


def speed_far(batches: Iterator[Any], store: ObjectStore, settings: Settings) -> tuple[tuple[float, ...], Counts]:
    """Return what `speed` returns of an epoch from the server, and its requests; our cache is empty before."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ[DIRECTORY_VARIABLE] = cache
        range_reader.cache_clear()
        store.behave(**settings.line)
        return speed(batches), store.counts()


def compare(ours: Epoch, peer: Epoch, store: ObjectStore, settings: Settings) -> str:
    """Return our images per second from the server over a peer's as text."""
    ratios = []
    for number in range(settings.num_rounds):
        (first, rate, _), (peer_first, peer_rate, _) = (
            speed_far(form(number), store, settings)[0] for form in (ours, peer)
        )
        num_left = settings.num_images - settings.batch_size
        ratios.append((rate / peer_rate, (peer_first + num_left / peer_rate) / (first + num_left / rate)))
    after_first, of_epoch = (spread(column) for column in zip(*ratios, strict=True))
    return f"after the first batch {after_first}, of the epoch {of_epoch}"


def measure_peers(
    tars: list[Path],
    ours: Epoch,
    tokenizer: PreTrainedTokenizerFast,
    store: ObjectStore,
    settings: Settings,
    scratch: Path,
) -> list[list[str]]:
    """Measure the peers and return their rows; print our images per second from the server over theirs."""
    urls = [f"{store.endpoint}/bucket/data/{tar.name}" for tar in tars]
    near = partial(webdataset_epoch, list(map(str, tars)), tokenizer, settings)
    far = partial(webdataset_epoch, urls, tokenizer, settings)
    rows = [["webdataset", *measure(near, far, sum(tar.stat().st_size for tar in tars), store, settings)]]
    print(f"PairSource / webdataset, from S3: {compare(ours, far, store, settings)}", flush=True)
    if not (version := mosaic_peer.version()):
        print("MosaicML Streaming is not installed; `benchmarks.mosaic_peer` says how")
        return rows
    num_bytes = mosaic_peer.write_shards(tars, scratch / "mds")
    store.upload(scratch / "mds", "bucket/mds")
    os.environ["S3_ENDPOINT_URL"] = store.endpoint

    def mosaic_epoch(remote: str | None, number: int) -> Iterator[Any]:
        cache = tempfile.mkdtemp(dir=scratch) if remote else str(scratch / "mds")
        return mosaic_peer.epoch(remote, cache, tokenizer, settings.image_size, settings.batch_size)

    far = partial(mosaic_epoch, "s3://bucket/mds")
    rows.append([f"Mosaic {version}", *measure(partial(mosaic_epoch, None), far, num_bytes, store, settings)])
    print(f"PairSource / MosaicML Streaming, from S3: {compare(ours, far, store, settings)}", flush=True)
    return rows


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
        store.behave(**settings.line)
        remote = prepare("s3://bucket/data", f"{scratch}/remote")
        assert remote.digest == local.digest
        rows = [["indexing", *describe(store.counts(), num_bytes), *[""] * 5]]
        near, ours = (partial(epoch, manifest, tokenizer, settings) for manifest in (local, remote))
        rows.append(["PairSource", *measure(near, ours, num_bytes, store, settings)])
        if settings.with_peers:
            rows += measure_peers(tars, ours, tokenizer, store, settings, Path(scratch))
    rows.append(["target", f"{BYTES}", f"{BYTES_PER_GET / 1e6:g}", "", "", "", f"{SPEED}", "", ""])
    print_table(["", "bytes", "MB/GET", "GETs", "local, images/s", "S3, images/s", "S3/local", "CPU", "first, s"], rows)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
