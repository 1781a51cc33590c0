"""Text from archives to the batches of a run: what is stored, counted and named, in which order it comes, what goes on."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import zstandard
from support import write_corpus, write_jsonl_zst
from text_archive_support import tar

from pipelines.plan import StreamPlan
from pipelines.problems import TooManyProblemsError
from pipelines.stream import Batch, RankStream
from pipelines.text import prepare as text_preparation
from pipelines.text.blocks import BlockSource, read_range
from pipelines.text.growing import GrowingManifest, GrowingSettings, PartPreparer, load_or_grow
from pipelines.text.manifest import Manifest
from pipelines.text.packing import DocumentConfig, PackingConfig
from pipelines.text.prepare import PrepareConfig, locate_text, prepare_text
from pipelines.text.reading import list_parts
from pipelines.text.tokenization import load_tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def prepare(source: Path, corpus: Path, root: Path, max_bad_share: float = 0.5, losses: str = "") -> Manifest:
    config, layout = configure(source, corpus, max_bad_share)
    return prepare_text(config, layout, str(root), max_bad_share_field="data.max_bad_share", losses=losses)


def configure(source: Path, corpus: Path, max_bad_share: float = 0.5) -> tuple[PrepareConfig, PackingConfig]:
    config = PrepareConfig(source=str(source), tokenizer=str(corpus / "tokenizer"), max_bad_share=max_bad_share)
    return config, PackingConfig.for_tokenizer(load_tokenizer(config.tokenizer), 32)


def documents_of(blocks: Batch) -> list[tuple[int, ...]]:
    """Return the documents in blocks in stored order, each as its targets, which end with the end-of-text token (0)."""
    targets = blocks["targets"][blocks["targets"] != -100]
    ends = np.flatnonzero(targets == 0)
    return [tuple(part.tolist()) for part in np.split(targets, ends + 1) if len(part)]


def test_two_epochs_over_two_workers_visit_every_document_once_in_different_orders(
    corpus: Path, tmp_path: Path
) -> None:
    manifest = prepare(corpus / "train", corpus, tmp_path)
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    texts = [
        json.loads(line)["text"]
        for path in sorted((corpus / "train").iterdir())
        for line in zstandard.decompress(path.read_bytes()).decode().splitlines()
    ]
    expected = [(*tokenizer.encode(text, add_special_tokens=False), 0) for text in texts]
    stored = read_range(manifest, 0, manifest.num_rows)
    assert documents_of(stored) == expected
    assert (manifest.num_documents, manifest.num_tokens) == (len(texts), sum(map(len, expected)))

    plan = StreamPlan(shard_sizes=manifest.shard_sizes, seed=3, window_size=100)
    size, batch_size = manifest.num_rows, 8
    stop = -(-2 * size // batch_size) * batch_size  # two epochs, and what fills the last batch

    def rank_batches(rank: int, world_size: int, start: int) -> list[Batch]:
        source = BlockSource(manifest=manifest)
        stream = RankStream(source=source, plan=plan, batch_size=batch_size, rank=rank, world_size=world_size)
        return list(stream.batches(start, stop))

    seen: dict[int, np.ndarray] = {}
    for rank in range(2):
        for step, batch in enumerate(rank_batches(rank, 2, 0)):
            assert (batch["place"] // batch_size == step).all()
            assert len(batch["place"]) == 4
            seen |= dict(zip(batch["place"].tolist(), batch["input_ids"], strict=True))
    assert sorted(seen) == list(range(stop))
    epochs = [[seen[place].tobytes() for place in range(epoch * size, (epoch + 1) * size)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(row.tobytes() for row in stored["input_ids"])
    assert epochs[0] != epochs[1]
    # One worker that goes on in mid-epoch gets the same.
    for batch in rank_batches(0, 1, size // batch_size // 2 * batch_size):
        for place, row in zip(batch["place"].tolist(), batch["input_ids"], strict=True):
            assert np.array_equal(row, seen[place])


def test_text_that_is_written_again_in_the_same_size_is_prepared_again(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    first = prepare(tmp_path / "a.jsonl", corpus, tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "two"}\n')
    other = prepare(tmp_path / "a.jsonl", corpus, tmp_path)
    assert other.digest != first.digest
    assert (
        other.plan(seed=0, window_size=8).identity["archives"] == first.plan(seed=0, window_size=8).identity["archives"]
    )


def test_preparing_again_is_free_and_an_interrupted_one_goes_on(corpus: Path, tmp_path: Path) -> None:
    first = prepare(corpus / "train", corpus, tmp_path)
    directory = Path(first.directory)
    times = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert prepare(corpus / "train", corpus, tmp_path) == first
    assert times == {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    part = "part-00001-00000"
    (directory / "manifest.json").unlink()
    (directory / f"{part}.json").unlink()
    assert prepare(corpus / "train", corpus, tmp_path) == first
    changed = {path.name for path in directory.iterdir() if times[path.name] != path.stat().st_mtime_ns}
    assert changed == {"manifest.json", f"{part}.json", f"{part}-00000.arrow", f"{part}.losses.jsonl"}


BAD = {
    "invalid_json": b"<html>",
    "missing_text": b'{"body": 1}',
    "invalid_utf8": b'{"text": "caf\xe9"}',
    "empty_document": b'{"text": ""}',
}


def test_broken_data_costs_its_records_and_every_one_is_counted_and_listed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    write_jsonl_zst(data / "good.jsonl.zst", [f"abc def {number} gh" for number in range(6)])
    write_jsonl_zst(data / "cut.jsonl.zst", [" ".join(np.random.default_rng(0).choice(["ab", "cd", "ef"], 500))] * 6)
    (data / "cut.jsonl.zst").write_bytes((data / "cut.jsonl.zst").read_bytes()[:-40])
    (data / "lines.jsonl").write_bytes(b'{"text": "abc"}\n' + b"\n".join([*BAD.values()] * 10))
    (data / "none.jsonl").write_text("\n" * 100)
    manifest = prepare(data, corpus, tmp_path / "prepared", max_bad_share=0.9, losses=str(tmp_path / "lost.jsonl"))
    per_archive = [{"truncated_archive": 1, "unread_document": 1}, {}, dict.fromkeys(BAD, 10), {"empty_archive": 1}]
    assert [archive.problems for archive in manifest.archives] == per_archive
    assert 7 <= manifest.num_documents < 13
    lost = [json.loads(line) for line in (tmp_path / "lost.jsonl").read_text().splitlines()]
    listed = [(loss["kind"], loss["where"]) for loss in lost if loss["archive"].endswith("lines.jsonl")]
    assert listed == [(kind, f"lines.jsonl:{1 + place}") for place, kind in enumerate([*BAD] * 10)]
    assert Counter(loss["kind"] for loss in lost) == manifest.problems
    assert all(loss["message"] for loss in lost)
    # Archives in parts of a record or two are the same archives.
    monkeypatch.setattr(text_preparation, "list_parts", partial(list_parts, part_bytes=16))
    parts = prepare(data, corpus, tmp_path / "parts", max_bad_share=0.9)
    assert parts.archives[2].num_parts > 2 < parts.archives[3].num_parts
    assert [archive.problems for archive in parts.archives] == [archive.problems for archive in manifest.archives]
    assert parts.num_documents == manifest.num_documents
    with pytest.raises(TooManyProblemsError, match=r"data\.max_bad_share = 0\.00%.*cut\.jsonl\.zst.*truncated_archive"):
        prepare(data, corpus, tmp_path / "prepared", max_bad_share=0.0)


def compress(data: bytes, suffix: str) -> bytes:
    """Return data compressed as the suffix of a file says; a tar has a member of ten lines after the other."""
    if suffix == "tar":
        lines = data.splitlines(keepends=True)
        return tar({f"{at}.jsonl": b"".join(lines[at : at + 10]) for at in range(0, len(lines), 10)})
    return gzip.compress(data)


@pytest.mark.parametrize("suffix", ["gz", "tar"])
@pytest.mark.parametrize("is_alone", [False, True], ids=["beside whole ones", "alone"])
def test_what_a_cut_archive_has_lost_is_estimated_and_listed(
    corpus: Path, tmp_path: Path, suffix: str, is_alone: bool
) -> None:
    """Of 300 documents; alone, as many as could be read are taken to be lost, as half of an archive on average is."""
    data, name = tmp_path / "data", "tar" if suffix == "tar" else f"jsonl.{suffix}"
    data.mkdir()
    rng = np.random.default_rng(0)
    for number in range(1 if is_alone else 3):
        texts = [" ".join(rng.choice(["ab", "cd", "ef", "gh"], 300)) for _ in range(300)]
        whole = compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode(), suffix)
        (data / f"{number}.{name}").write_bytes(whole if number else whole[: len(whole) // 2])
    losses = tmp_path / "losses.jsonl"
    config = PrepareConfig(source=str(data), tokenizer=str(corpus / "tokenizer"), max_bad_share=0.9)
    layout = DocumentConfig(least_num_tokens=1, vocab_size=len(load_tokenizer(config.tokenizer)))
    manifest = prepare_text(config, layout, str(tmp_path / "prepared"), losses=str(losses))
    num_lost = 300 - manifest.archives[0].num_documents
    assert 100 < num_lost < 200
    assert manifest.problems["unread_document"] == pytest.approx(num_lost, rel=0.15)
    *_, last = map(json.loads, losses.read_text().splitlines())
    assert last["count"] == manifest.problems["unread_document"]
    assert f"about {last['count']} documents, estimated from " in last["message"]


def test_data_without_any_document_is_refused(corpus: Path, tmp_path: Path) -> None:
    write_jsonl_zst(tmp_path / "data" / "a.jsonl.zst", [])
    with pytest.raises(TooManyProblemsError, match="holds no readable document"):
        prepare(tmp_path / "data", corpus, tmp_path / "prepared", max_bad_share=1.0)


def test_text_that_is_complete_is_judged_by_its_lost_records_before_it_is_streamed(
    corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('"abc def"\n"  "\n')
    (tmp_path / "data" / "b.csv").touch()
    prepare(tmp_path / "data", corpus, tmp_path)

    def load(max_bad_share: float) -> Manifest | GrowingManifest:
        settings = GrowingSettings(seed=0, max_bad_share=max_bad_share, max_bad_share_field="data.max_bad_share")
        return load_or_grow(*configure(tmp_path / "data", corpus), str(tmp_path), settings)

    with pytest.raises(TooManyProblemsError, match=r"data\.max_bad_share = 10\.00%.*empty_document"):
        load(0.1)
    assert load(0.5).not_read == ["b.csv"]


def test_a_list_of_losses_that_cannot_be_written_is_refused_before_anything_is_read(
    corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere/lost\.jsonl"):
        prepare(corpus / "train", corpus, tmp_path / "prepared", losses=str(tmp_path / "nowhere" / "lost.jsonl"))
    assert not (tmp_path / "prepared").exists()


def test_archives_that_are_written_again_between_their_parts_are_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_preparation, "list_parts", partial(list_parts, part_bytes=16))
    (tmp_path / "a.jsonl").write_text('"abc def"\n' * 9)
    task = locate_text(*configure(tmp_path / "a.jsonl", corpus), str(tmp_path))[0].divide()
    records = [task.run(0)]
    (tmp_path / "a.jsonl").write_text('"fed cba"\n' * 9)
    records += [task.run(number) for number in range(1, len(task.parts))]
    with pytest.raises(OSError, match=r"a\.jsonl was written again between its parts: delete"):
        task.finish(records)


def test_a_part_whose_task_crashed_is_prepared_when_it_is_asked_for_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, layout = configure(corpus / "train", corpus)
    task = locate_text(config, layout, str(tmp_path))[0].divide()
    crashed = iter([True])

    async def run(_: object, part: int) -> tuple[dict[str, Any], int]:
        await asyncio.sleep(0.01)
        if next(crashed, False):
            raise ray.exceptions.WorkerCrashedError
        return task.run(part), 0

    actor = PartPreparer.__ray_metadata__.modified_class
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(actor, "_submit", lambda self, part: asyncio.ensure_future(run(self, part)))

    async def ask_twice() -> list[int]:
        preparer = actor(task, GrowingSettings(seed=0, num_parts_ahead=0))
        first = preparer._order[0]
        answers = await asyncio.gather(preparer.wait_for(first), preparer.wait_for(first), return_exceptions=True)
        assert [type(answer) for answer in answers] == [ray.exceptions.WorkerCrashedError] * 2
        return await preparer.wait_for(first)

    assert sum(asyncio.run(ask_twice())) > 0
