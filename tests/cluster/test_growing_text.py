"""Test text that is prepared while training runs: the batches are those of text that was prepared ahead."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from support import at_the_same_time, history, wait_for, write_jsonl_zst
from task_support import tiny_sentences

from jobs.engine.launch import train
from jobs.engine.resumption import FatalTrainingError
from jobs.tasks.sentence_encoder.config import SentenceConfig
from jobs.tasks.sentence_encoder.plan import make_plan
from pipelines.archives import list_archives
from pipelines.plan import StreamPlan
from pipelines.problems import TooManyProblemsError
from pipelines.stream import RankStream
from pipelines.text import prepare as text_preparation
from pipelines.text.blocks import BlockSource
from pipelines.text.growing import GrowingManifest, GrowingSettings, load_or_grow
from pipelines.text.manifest import Manifest
from pipelines.text.packing import PackingConfig
from pipelines.text.prepare import PrepareConfig
from pipelines.text.reading import Document, list_parts, read_documents
from pipelines.text.tokenization import load_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SEED, WINDOW, BATCH = 5, 40, 8


def json_lines(corpus: Path) -> list[str]:
    """Return the training documents of the corpus, which need no escapes, as JSON lines."""
    place = str(corpus / "train")
    items = [item for archive in list_archives(place) for item in read_documents(place, archive)]
    return [f'{{"text": "{item.text}"}}\n' for item in items if isinstance(item, Document)]


@pytest.fixture
def source(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the corpus as one file of JSON lines, which is divided into parts of 4 KiB."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.jsonl").write_text("".join(json_lines(corpus)))
    monkeypatch.setattr(text_preparation, "list_parts", partial(list_parts, part_bytes=4096))
    return tmp_path / "data"


def configure(source: Path, corpus: Path) -> tuple[PrepareConfig, PackingConfig]:
    config = PrepareConfig(source=str(source), tokenizer=str(corpus / "tokenizer"))
    return config, PackingConfig.for_tokenizer(load_tokenizer(config.tokenizer), 32)


def grow(source: Path, corpus: Path, root: Path, **settings: Any) -> GrowingManifest:
    manifest = load_or_grow(*configure(source, corpus), str(root), GrowingSettings(seed=SEED, num_cpus=0.5, **settings))
    assert isinstance(manifest, GrowingManifest)
    return manifest


def stream(manifest: Manifest | GrowingManifest, rank: int = 0, world_size: int = 1, **options: int) -> RankStream:
    return RankStream(
        source=BlockSource(manifest=manifest),
        plan=manifest.plan(seed=SEED, window_size=WINDOW),
        batch_size=BATCH,
        rank=rank,
        world_size=world_size,
        **options,
    )


def test_preparing_runs_ahead_by_a_bounded_number_of_parts_and_goes_on_from_them(
    cluster: dict[str, str], corpus: Path, source: Path, tmp_path: Path
) -> None:
    growing = grow(source, corpus, tmp_path, num_parts_ahead=2)
    order = StreamPlan(shard_sizes=(1,) * len(growing.part_names), seed=SEED).order_parts(0)
    plan = growing.plan(seed=SEED, window_size=WINDOW)

    def records() -> set[str]:
        return {path.stem for path in Path(growing.directory).glob("part-*.json")}

    wait_for(lambda: records() == {growing.part_names[order[0]]})  # the first part, before anybody asks for one
    for part in order[:3]:
        plan.part(part)
    assert plan.num_items_per_epoch is None
    expected = {growing.part_names[part] for part in order[:5]}
    wait_for(lambda: len(records()) >= len(expected))
    time.sleep(1)  # time in which more parts would be prepared
    assert records() == expected
    times = {name: (Path(growing.directory) / f"{name}.json").stat().st_mtime_ns for name in expected}
    ray.kill(growing.preparer)
    again = grow(source, corpus, tmp_path, num_parts_ahead=100).plan(seed=SEED, window_size=WINDOW)
    for part in order:
        assert again.part(part)
    assert all((Path(growing.directory) / f"{name}.json").stat().st_mtime_ns == times[name] for name in expected)
    (Path(growing.directory) / "manifest.json").unlink()  # all parts are there, as where a preparation was killed
    whole = grow(source, corpus, tmp_path)
    assert whole.plan(seed=SEED, window_size=WINDOW).part(0)
    manifest = whole.latest()
    assert isinstance(manifest, Manifest)
    identity = manifest.plan(seed=SEED, window_size=WINDOW).identity
    assert identity["archives"] == whole.plan(seed=SEED, window_size=WINDOW).identity["archives"]


def test_too_many_lost_records_and_a_file_that_is_gone_end_the_reading(
    cluster: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    for number in range(4):
        write_jsonl_zst(tmp_path / "data" / f"{number}.jsonl.zst", [f"abc def {number} gh"] * 40 + ["  "] * 2)
    growing = grow(tmp_path / "data", corpus, tmp_path / "prepared", max_bad_share_field="data.max_bad_share")
    with pytest.raises(TooManyProblemsError, match=r"data\.max_bad_share = 1\.00%.*empty_document"):
        list(stream(growing).batches(0, BATCH * 100))
    gone = grow(tmp_path / "data", corpus, tmp_path / "other", max_bad_share=0.1)
    shutil.move(tmp_path / "data" / "2.jsonl.zst", tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=r"2\.jsonl\.zst"):
        list(stream(gone).batches(0, BATCH * 10))
    shutil.move(tmp_path / "away", tmp_path / "data" / "2.jsonl.zst")
    assert list(stream(gone).batches(0, BATCH * 10))  # a worker that is restarted reads on


def sentences(
    source: Path, corpus: Path, wordpiece: Path, storage: Path, *, num_workers: int = 1, **data: Any
) -> SentenceConfig:
    """Return a tiny run of a sentence encoder, whose prepared text is in its storage."""
    return tiny_sentences(
        corpus,
        wordpiece,
        storage,
        "sentences",
        run={"seed": SEED, "prepared": str(storage / "prepared")},
        data={"train": str(source), "shuffle_window": 20, "num_parts_ahead": 1, "prepare_cpus": 0.5, **data},
        temperature={"loss": "tempnet_in_batch", "projection": False},
        workers={"num_workers": num_workers},
        tracking={"uri": f"sqlite:///{storage}/mlflow.db"},
    )


def test_a_sentence_encoder_that_was_stopped_trains_as_if_its_text_had_been_prepared_ahead(
    cluster: dict[str, str], corpus: Path, wordpiece: Path, tmp_path: Path
) -> None:
    """With two workers it lacks an archive in mid-epoch; with one worker and that archive it goes on."""
    source, num_parts = tmp_path / "data", 12
    source.mkdir()
    for number in range(num_parts):
        (source / f"{number:02}.jsonl").write_text("".join(json_lines(corpus)[number::num_parts]))
    expected = train(make_plan(sentences(source, corpus, wordpiece, tmp_path / "ahead")))

    storage = tmp_path / "streaming"
    missing = source / f"{StreamPlan(shard_sizes=(1,) * num_parts, seed=SEED).order_parts(0)[8]:02}.jsonl"

    def take_away() -> None:
        wait_for(lambda: any(storage.glob("prepared/data-*/part-*.json")))
        shutil.move(missing, tmp_path / "away")

    with at_the_same_time(take_away), pytest.raises(FatalTrainingError, match=missing.name):
        train(make_plan(sentences(source, corpus, wordpiece, storage, prepare="streaming", num_workers=2)))
    shutil.move(tmp_path / "away", missing)
    assert not any(storage.glob("prepared/data-*/manifest.json"))
    outcome = train(make_plan(sentences(source, corpus, wordpiece, storage, prepare="streaming")))
    assert 5 <= outcome["resumed_from_step"] < 40
    assert outcome["batches_digest"] == expected["batches_digest"]
    losses, of_ahead = history(outcome, "train/loss"), history(expected, "train/loss")
    assert losses == pytest.approx(of_ahead, abs=1e-4)
    for name in ("num_documents_train", "num_documents_too_short", "num_documents_lost", "num_epochs"):
        assert outcome[name] == expected[name]
    assert outcome["num_epochs"] > 1
