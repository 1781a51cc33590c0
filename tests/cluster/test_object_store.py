"""Test that a stream of data in a real S3 server is that of the local files, read once and in large ranges."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from s3_support import ObjectStore, run_object_store

from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, prepare_images
from pipelines.plan import StreamPlan
from pipelines.stream import RankStream, Source
from pipelines.text.blocks import BlockSource
from pipelines.text.manifest import Manifest
from pipelines.text.packing import PackingConfig
from pipelines.text.prepare import PrepareConfig, prepare_text
from pipelines.text.tokenization import load_tokenizer, train_bpe

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with run_object_store(tmp_path_factory.mktemp("store") / "log") as store:
        yield store


def write_tars(directory: Path, num_tars: int, num_images: int) -> None:
    """Write tars of 9 MB and more, so that each has at least a block, with images that do not compress."""
    directory.mkdir()
    for number in range(num_tars):
        with tarfile.open(directory / f"{number:05d}.tar", "w") as tar:
            for key in range(num_images):
                pixels = np.random.default_rng([number, key]).integers(0, 256, (400, 500, 3), dtype=np.uint8)
                buffer = io.BytesIO()
                Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
                for suffix, data in (("png", buffer.getvalue()), ("txt", f"caption {key}".encode())):
                    info = tarfile.TarInfo(f"{number:05d}{key:04d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def digests(
    source: Source, shard_sizes: tuple[int, ...], rank: int, *, window: int, readers: int, start: int = 0
) -> Iterator[list[int]]:
    """Yield the digests of a rank's batches, of two ranks, from a place on up to the end of two epochs."""
    stream = RankStream(
        source=source, plan=StreamPlan(shard_sizes=shard_sizes, seed=1, window_size=window), batch_size=8, rank=rank,
        world_size=2, num_readers=readers, num_batches_per_task=2, num_batches_per_output=1,
    )  # fmt: skip
    for batch in stream.batches(start, 2 * sum(shard_sizes) // 8 * 8):
        yield batch["digest"].tolist()


def test_images_of_a_stream(cluster: dict[str, str], store: ObjectStore, tmp_path: Path) -> None:
    write_tars(tmp_path / "data", 4, 16)
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "data").iterdir())
    store.upload(tmp_path / "data", "bucket/data")
    # The workers of the shared Ray were started without the address of the server, so the URI has it.
    endpoint = store.endpoint.removeprefix("http://")
    uri = f"s3://testing:testing@bucket/data?scheme=http&region=us-east-1&endpoint_override={endpoint}"
    store.behave(latency=0.03)
    local = prepare_images(PrepareImagesConfig(source=str(tmp_path / "data")), str(tmp_path / "local"))
    remote = prepare_images(PrepareImagesConfig(source=uri), str(tmp_path / "remote"))
    assert remote.digest == local.digest
    counts = store.counts()
    assert counts.num_bytes <= 1.05 * num_bytes
    assert counts.num_bytes >= 8e6 * counts.num_gets

    tokenizer = train_bpe([f"caption {number}" for number in range(16)], 300)
    tokenizer.pad_token = tokenizer.eos_token

    def source(manifest: ImageManifest) -> PairSource:
        return PairSource(manifest=manifest, tokenizer=tokenizer, image_size=32, cache_bytes=2**30)

    def batches(manifest: ImageManifest, rank: int, start: int = 0) -> Iterator[list[int]]:
        return digests(source(manifest), manifest.shard_sizes, rank, window=20, readers=2, start=start)

    references = [list(digests(source(local), local.shard_sizes, rank, window=20, readers=0)) for rank in range(2)]
    # A tar that is gone ends the reading with its name. When it is back, the next batch is the one that was missing.
    line = {"latency": 0.03, "bytes_per_second": 100e6, "share_failing": 0.3, "seed": 1}
    store.behave(**line, gone="00002.tar")
    found: list[list[int]] = []
    with pytest.raises(Exception, match=r"s3://bucket/data/00002\.tar: there is no such object"):
        found.extend(batches(remote, 0))
    assert len(found) < len(references[0])
    all_counts = [store.counts()]
    store.behave(**line)
    assert found + list(batches(remote, 0, start=8 * len(found))) == references[0]
    assert list(batches(remote, 1)) == references[1]
    # Two epochs of two ranks read every byte once, because all processes of the node share the cache.
    all_counts.append(store.counts())
    assert sum(count.num_failed for count in all_counts) > 0
    assert sum(count.num_bytes for count in all_counts) <= 1.05 * num_bytes
    assert sum(count.num_bytes for count in all_counts) >= 8e6 * sum(count.num_gets for count in all_counts)


def test_blocks_of_text_of_a_stream(
    cluster: dict[str, str], store: ObjectStore, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PrepareConfig(source=str(corpus / "train"), tokenizer=str(corpus / "tokenizer"))
    layout = PackingConfig.for_tokenizer(load_tokenizer(str(corpus / "tokenizer")), 32)
    local = prepare_text(config, layout, str(tmp_path / "prepared"))
    store.upload(Path(local.directory), "bucket/prepared")
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TEMPNET_CACHE", str(tmp_path / "cache"))
    remote = Manifest.load("s3://bucket/prepared")
    assert remote == dataclasses.replace(local, directory="s3://bucket/prepared")
    store.behave()
    source = BlockSource(manifest=remote, cache_bytes=2**30)
    for rank in range(2):
        reference = list(digests(BlockSource(manifest=local), local.shard_sizes, rank, window=64, readers=0))
        assert list(digests(source, remote.shard_sizes, rank, window=64, readers=0)) == reference
    assert store.counts().num_gets == len(remote.shards)
