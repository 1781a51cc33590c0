"""Test data on Ray: prepared and streamed as without it, with little of a worker's time, on the nodes that read, counted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from jobs.engine.cluster import check_placement
from pipelines import stream as stream_module
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, prepare_images
from pipelines.plan import StreamPlan
from pipelines.prepare import preparing_here, run_tasks
from pipelines.store_errors import RETRIES
from pipelines.stream import Batch, RankStream, Source
from pipelines.text.blocks import BlockSource
from pipelines.text.manifest import Manifest
from pipelines.text.packing import PackingConfig
from pipelines.text.prepare import PrepareConfig, prepare_text
from pipelines.text.tokenization import load_tokenizer

pytestmark = pytest.mark.cluster


@contextmanager
def without_ray() -> Iterator[None]:
    """Let preparation and streams take Ray for not running."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: False)
        yield


def stream(source: Any, sizes: Sequence[int], rank: int = 0, world_size: int = 1, **options: Any) -> RankStream:
    plan = StreamPlan(shard_sizes=tuple(sizes), seed=0, window_size=options.pop("window_size", 2**20))
    return RankStream(source=source, plan=plan, rank=rank, world_size=world_size, **{"batch_size": 8} | options)


def assert_same_stream(source: Source, sizes: Sequence[int], **options: int) -> None:
    """Assert that Ray's tasks read what one process reads without them, from a place on to the end of two epochs."""
    start, stop = 16, 2 * sum(sizes) // 8 * 8
    for rank in range(2):
        ranks = stream(source, sizes, rank, 2, window_size=20, num_batches_per_output=1, **options)
        with without_ray():
            expected = list(ranks.batches(start, stop))
        for found, wanted in zip(ranks.batches(start, stop), expected, strict=True):
            assert found.keys() == wanted.keys()
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_text_and_images_are_prepared_and_streamed_as_without_ray(
    cluster: dict[str, str], corpus: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    layout = PackingConfig.for_tokenizer(tokenizer, 256)

    def prepare(place: str) -> tuple[Manifest, ImageManifest]:
        text = PrepareConfig(source=str(corpus / "validation"), tokenizer=str(corpus / "tokenizer"))
        pairs = PrepareImagesConfig(source=str(images / "train"))
        root = str(tmp_path / place)
        return prepare_text(text, layout, root), prepare_images(pairs, root)

    with without_ray():
        expected = prepare("alone")
    text, pairs = prepare("ray")
    for found, wanted in zip((text, pairs), expected, strict=True):
        assert replace(found, directory=wanted.directory) == wanted
    # The number of a rank's tasks is bounded: short segments are joined without a seam, in mid-batch, too.
    monkeypatch.setattr(stream_module, "_NUM_TASKS_PER_SEGMENT", 3)
    assert_same_stream(BlockSource(manifest=text), text.shard_sizes)
    source = PairSource(manifest=pairs, tokenizer=tokenizer, image_size=16)
    assert_same_stream(source, pairs.shard_sizes, num_readers=2, num_batches_per_task=4)


@dataclass
class Asked:
    """Returns with every item which shards were said to be needed before it was read."""

    asked: tuple[int, ...] = ()

    def prefetch(self, now: Sequence[int], later: Sequence[int], before: Sequence[int]) -> None:
        self.asked = (*now, *(later or (-1,)), *(before or (-1,)))

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        return {"digest": rows, "shard": shards, "asked": np.tile(self.asked, (len(rows), 1))}


@pytest.mark.long
@pytest.mark.parametrize(("num_batches_per_task", "in_this_process"), [(1, False), (None, False), (None, True)])
def test_a_stream_fetches_its_window_and_the_next_one_ahead_and_keeps_the_one_before_for_a_quarter(
    cluster: dict[str, str], num_batches_per_task: int | None, in_this_process: bool
) -> None:
    reading = stream(
        Asked(), [16] * 5, batch_size=2, window_size=16, num_batches_per_task=num_batches_per_task, num_batches_per_output=1
    )  # fmt: skip
    order = [window.shards[0] for window in reading.plan.windows(0, 128)]
    batches = reading.batches(0, 128, in_this_process=in_this_process)
    found = [(int(batch["shard"][0]), *batch["asked"][0].tolist()) for batch in batches]
    assert found == [
        (now, now, later, before if batch < 2 else -1)
        for before, now, later in zip([-1, *order], order, [*order[1:], -1], strict=False)
        for batch in range(8)
    ]


HEAD = "node:__internal_head__"
"""A custom resource that every Ray has, 1 of it on one node; it stands for one that a person gives to nodes that read."""


def amount_taken() -> float:
    """Return how much of the custom resource the task has that this is called in."""
    return ray.get_runtime_context().get_assigned_resources().get(HEAD, 0.0)


class Reporting:
    """Reads items that tell how much of the custom resource the task has, and repeats a request for every item."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        for _ in rows:
            RETRIES.add()
        return {"digest": rows, "amount": np.full(len(rows), amount_taken())}


def test_a_task_that_holds_all_cpus_prepares_data_itself(cluster: dict[str, str], tmp_path: Path) -> None:
    def prepare() -> list[dict[str, Any]]:
        with preparing_here():
            return run_tasks(lambda number: {"number": number}, ["a", "b"], str(tmp_path))

    whole: Any = ray.remote(num_cpus=ray.cluster_resources()["CPU"])(prepare)
    assert ray.get(whole.remote(), timeout=60) == [{"number": 0}, {"number": 1}]


@pytest.mark.long
def test_tasks_take_the_resources_of_their_nodes_and_send_their_counts(
    cluster: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(number: int) -> dict[str, Any]:
        for _ in range(number):
            RETRIES.add()
        return {"number": number, "amount": amount_taken()}

    RETRIES.take()
    entries = run_tasks(prepare, [f"unit-{n}" for n in range(4)], str(tmp_path), resources={HEAD: 0.25})
    assert entries == [{"number": number, "amount": 0.25} for number in range(4)]
    assert RETRIES.take() == 6
    said = [line for line in capsys.readouterr().err.splitlines() if "were repeated" in line]
    assert len(said) == 1
    assert re.search(r": \d+; \d+ so far$", said[0])
    reading = stream(
        Reporting(), [8, 8, 16], window_size=8, num_readers=2, num_batches_per_task=2, num_batches_per_output=1,
        reader_resources={HEAD: 0.25},
    )  # fmt: skip
    for batch in reading.batches(0, 64):
        assert set(batch) == {"digest", "place", "amount"}
        assert batch["amount"].tolist() == [0.25] * 8
    assert RETRIES.take() == 64
    check_placement("data.reader_resources", {HEAD: 1.0})
    check_placement("data.reader_resources", {})
    with pytest.raises(ValueError, match=r"data.reader_resources = reader=0.5, but no node .* \(largest: reader=0\)"):
        check_placement("data.reader_resources", {"reader": 0.5}, max_wait_minutes=0.01)
    assert "the cluster has too few nodes for reader=0.5" in capsys.readouterr().err
