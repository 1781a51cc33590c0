"""CC12M and OpenWebText2 at their full sizes: what their manifests, orders and indexes cost, and when the first batch comes.

    .venv/bin/python -m benchmarks.scale [--tars 1243] [--parts 2026] [--directory DIR]

The prepared data are simulated. CC12M has 12.4 million pairs in 1 243 tars of 10 000, as img2dataset writes them: every
tar is a hard link to one real tar of small images, and every tar has an index file of its own, with other keys.
OpenWebText2 has 17 billion tokens in 16.6 million blocks of 1 024, in 2 026 parts of two shards of 4 096 blocks: every
shard is a hard link to one real shard. What is measured is what a run does: combining the indexes into a manifest,
loading the manifest, and reading the first batch as rank 3 of 8, at the beginning and in the middle of the eighth
epoch, through Ray Data with its workers' start. Everything is measured in a process of its own; memory is what the
process has more than after its imports (its largest resident set, with what it maps of files).
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import platform
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pyarrow as pa
import ray
import tyro
from PIL import Image

from jobs.engine.cluster import listen_on_loopback
from pipelines.images.archives import list_image_archives
from pipelines.images.assembly import assemble
from pipelines.images.index import index_archive, index_name
from pipelines.images.manifest import ImageManifest, open_index
from pipelines.images.pairs import PairSource
from pipelines.plan import StreamPlan
from pipelines.stream import RankStream, Source
from pipelines.text.blocks import BlockSource
from pipelines.text.manifest import ArchiveEntry, Manifest, ShardEntry
from pipelines.text.packing import PackingConfig
from pipelines.text.tokenization import train_bpe
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.state import SampleState

Result = TypeVar("Result")

_PAIRS_PER_TAR, _BLOCKS_PER_SHARD, _SHARDS_PER_PART, _CONTEXT_LENGTH = 10_000, 4_096, 2, 1_024
_WORLD_SIZE, _RANK, _NUM_EPOCHS = 8, 3, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Sizes of the simulated data."""

    tars: int = 1_243
    """Number of tars of 10 000 pairs."""
    parts: int = 2_026
    """Number of parts of the text, of 8 192 blocks each."""
    directory: str = ""
    """Directory for the simulated data, about 2 GB; by default a temporary one."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds and megabytes of an action."""

    seconds: float
    megabytes: float

    def __str__(self) -> str:
        return f"{self.seconds:6.2f} s {self.megabytes:7.0f} MB"


# ---- making the data ----


def make_pairs(root: Path, num_tars: int) -> list[dict[str, Any]]:
    """Write the tars and their index files; return the results of indexing, as `assemble` takes them."""
    tars, prepared = root / "tars", root / "pairs"
    tars.mkdir()
    prepared.mkdir()
    first = tars / "00000.tar"
    rng = np.random.default_rng(0)
    images = []
    for _ in range(16):
        data = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(data, "JPEG")
        images.append(data.getvalue())
    with tarfile.open(first, "w") as tar:
        for pair in range(_PAIRS_PER_TAR):
            for suffix, content in (
                ("jpg", images[pair % 16]),
                ("txt", f"a caption of about sixty letters, {pair}".encode()),
            ):
                info = tarfile.TarInfo(f"{pair:09d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    archive = list_image_archives(str(tars))[0]
    entry = index_archive(str(tars), archive, None, max_pixels=10**6, index=f"{prepared}/{index_name(0)}")
    table = open_index(str(prepared), index_name(0))
    entries = [entry]
    for number in range(1, num_tars):
        other = tars / f"{number:05d}.tar"
        os.link(first, other)
        keys = pa.array([f"{number:05d}{pair:04d}" for pair in range(_PAIRS_PER_TAR)])
        with pa.ipc.new_file(f"{prepared}/{index_name(number)}", table.schema) as writer:
            writer.write_table(table.set_column(0, "key", keys))
        entries.append(entry | {"file": index_name(number), "archive": str(other)})
    return entries


def make_text(root: Path, num_parts: int) -> str:
    """Write the shards and their manifest; return the prepared directory."""
    prepared = root / "text"
    prepared.mkdir()
    layout = PackingConfig(context_length=_CONTEXT_LENGTH, bos_id=0, eos_id=0, vocab_size=50_257)
    rng = np.random.default_rng(0)
    num_tokens = _BLOCKS_PER_SHARD * _CONTEXT_LENGTH
    documents = (rng.integers(1, 50_257, 1_023) for _ in range(num_tokens // 1_024))
    shards = []
    for part in range(num_parts):
        for number in range(_SHARDS_PER_PART):
            name = f"part-00000-{part:05d}-{number:05d}.arrow"
            shards.append(
                ShardEntry(
                    file=name, archive="owt2.jsonl.zst.tar", part=part, num_rows=_BLOCKS_PER_SHARD,
                    num_tokens=num_tokens, digest=f"{part:08x}{number:08x}",
                )
            )  # fmt: skip
            if len(shards) == 1:
                with pa.ipc.new_file(f"{prepared}/{name}", layout.schema) as writer:
                    for batch in layout.rows(documents):
                        writer.write_batch(batch)
            else:
                os.link(prepared / shards[0].file, prepared / name)
    archive = ArchiveEntry(
        path="owt2.jsonl.zst.tar", num_bytes=28 * 10**9, num_documents=17_103_059, problems={}, examples=[],
        shards=shards, num_parts=num_parts,
    )  # fmt: skip
    Manifest(directory=str(prepared), tokenizer_digest="0" * 16, layout=layout, archives=[archive]).save()
    return str(prepared)


# ---- measuring ----


def run_alone(action: Callable[..., Result], *arguments: Any) -> tuple[Result, Cost]:
    """Return the result of a function of this module, run in a process of its own, and its cost."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, action, *arguments).result()


def _measure(action: Callable[..., Result], *arguments: Any) -> tuple[Result, Cost]:
    before = psutil.Process().memory_info().rss
    peak_of_process()  # What the imports took for a moment does not count.
    started = time.perf_counter()
    result = action(*arguments)
    seconds = time.perf_counter() - started
    peak = max(peak_of_process(), psutil.Process().memory_info().rss)
    return result, Cost(seconds, (peak - before) / 1e6)


def peak_of_process() -> int:
    """Return the largest number of resident bytes since the last call, where the kernel allows it to be set back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * peak


def combine(entries: list[dict[str, Any]], root: Path) -> int:
    """Combine the indexes of all tars into a manifest; return its number of pairs."""
    manifest = assemble(
        entries, None, directory=f"{root}/pairs", source=f"{root}/tars", captions_uri="", max_pixels=10**6
    )
    manifest.save()
    return manifest.num_pairs


def open_data(kind: str, directory: str) -> tuple[Source, StreamPlan, int]:
    """Return the source, the order and the batch size of `pairs` or `text`."""
    if kind == "text":
        text = Manifest.load(directory)
        return BlockSource(manifest=text), text.plan(seed=0, window_size=8192), 512
    pairs = ImageManifest.load(directory)
    tokenizer = train_bpe(["a caption of about sixty letters"] * 20, 300)
    tokenizer.pad_token = tokenizer.eos_token
    source = PairSource(manifest=pairs, tokenizer=tokenizer, image_size=32)
    return source, StreamPlan(shard_sizes=pairs.shard_sizes, seed=0, window_size=8192), 1024


def read_first(kind: str, directory: str, epoch: float, num_readers: int) -> tuple[float, int]:
    """Read the first batch after a number of epochs; return the seconds from the manifest on, and the number of tasks."""
    if num_readers:
        os.environ.setdefault("RAY_worker_niceness", "0")  # as `jobs.engine.cluster` sets it
        listen_on_loopback()
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    started = time.perf_counter()
    source, plan, batch_size = open_data(kind, directory)
    size = plan.num_items_per_epoch
    assert size is not None
    stream = RankStream(
        source=source, plan=plan, batch_size=batch_size, rank=_RANK, world_size=_WORLD_SIZE, num_readers=num_readers,
        num_batches_per_task=8 if kind == "pairs" else None,
    )  # fmt: skip
    start = int(epoch * size) // batch_size * batch_size
    batches = stream.batches(start, _NUM_EPOCHS * size // batch_size * batch_size)
    batch = next(batches)
    seconds = time.perf_counter() - started
    del batches  # This ends what Ray Data still reads ahead.
    assert batch["place"][0] == start + _RANK * batch_size // _WORLD_SIZE
    return seconds, len(batch["place"])


def make_state(num_samples: int) -> int:
    """Make the per-sample state of iSogCLR, of all ranks together, and return its bytes."""
    return SampleState(num_samples, ContrastiveLossConfig.for_name("isogclr").state_columns).bytes_per_rank


def main(arguments: Arguments) -> None:
    """Make the data, measure, and print."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, ray {ray.__version__}, pyarrow {pa.__version__}", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.directory or None) as scratch:
        root = Path(scratch)
        entries = make_pairs(root, arguments.tars)
        num_pairs, cost = run_alone(combine, entries, root)
        print(f"{num_pairs:,} pairs: indexes combined into a manifest {cost}", flush=True)
        text = make_text(root, arguments.parts)
        for kind, directory in ("pairs", f"{root}/pairs"), ("text", text):
            size = (root / kind / "manifest.json").stat().st_size / 1e6
            _, cost = run_alone(open_data, kind, directory)
            print(f"{kind}: manifest of {size:.1f} MB, order and source {cost}")
            for where, epoch in ("at the beginning", 0.0), ("resumed in mid-epoch 8", 7.5):
                _, cost = run_alone(read_first, kind, directory, epoch, 0)
                (seconds, number), _ = run_alone(read_first, kind, directory, epoch, 2)
                print(
                    f"{kind}: first {number} items {where}, in the process itself {cost}; through Ray Data {seconds:.2f} s",
                    flush=True,
                )
        num_bytes, cost = run_alone(make_state, num_pairs)
        print(f"iSogCLR's state of {num_pairs:,} pairs, over all ranks: {num_bytes / 1e6:.0f} MB, {cost}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
