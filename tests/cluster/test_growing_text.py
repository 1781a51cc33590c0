"""Test text that is prepared while training runs: the batches are those of text that was prepared ahead."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from support import at_the_same_time, corpus_lines, history, wait_for, write_jsonl_zst
from task_support import tiny_sentences

from jobs.engine.launch import train
from jobs.engine.resumption import FatalTrainingError
from jobs.tasks.sentence_encoder.config import SentenceConfig
from jobs.tasks.sentence_encoder.plan import make_plan
from pipelines.plan import StreamPlan
from pipelines.problems import TooManyProblemsError
from pipelines.stream import RankStream
from pipelines.text.blocks import BlockSource
from pipelines.text.growing import GrowingManifest, GrowingSettings, load_or_grow
from pipelines.text.manifest import Manifest
from pipelines.text.packing import PackingConfig
from pipelines.text.prepare import PrepareConfig
from pipelines.text.tokenization import load_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SEED, WINDOW, BATCH, NUM_PARTS = 5, 40, 8, 12
ORDER = StreamPlan(shard_sizes=(1,) * NUM_PARTS, seed=SEED).order_parts(0)


@pytest.fixture
def source(corpus: Path, tmp_path: Path) -> Path:
    """Write the corpus as files of JSON lines, each of which is a part, and return their directory."""
    (tmp_path / "data").mkdir()
    for number in range(NUM_PARTS):
        lines = corpus_lines(corpus)[number::NUM_PARTS]
        (tmp_path / "data" / f"{number:02}.jsonl").write_bytes(b"".join(lines))
    return tmp_path / "data"


def grow(source: Path, corpus: Path, root: Path, **settings: Any) -> GrowingManifest:
    config = PrepareConfig(source=str(source), tokenizer=str(corpus / "tokenizer"))
    layout = PackingConfig.for_tokenizer(load_tokenizer(config.tokenizer), 32)
    manifest = load_or_grow(config, layout, str(root), GrowingSettings(seed=SEED, num_cpus=0.5, **settings))
    assert isinstance(manifest, GrowingManifest)
    return manifest


def test_preparing_runs_ahead_by_a_bounded_number_of_parts_and_goes_on_from_them(
    cluster: dict[str, str], corpus: Path, source: Path, tmp_path: Path
) -> None:
    growing = grow(source, corpus, tmp_path, num_parts_ahead=2)
    names, plan = [growing.part_names[part] for part in ORDER], growing.plan(seed=SEED, window_size=WINDOW)

    def records() -> dict[str, int]:
        return {path.stem: path.stat().st_mtime_ns for path in Path(growing.directory).glob("part-*.json")}

    wait_for(lambda: records().keys() == {names[0]})  # the first part, before anybody asks for one
    for part in ORDER[:3]:
        plan.part(part)
    assert plan.num_items_per_epoch is None
    wait_for(lambda: len(records()) >= 5)
    time.sleep(1)  # time in which more parts would be prepared
    before = records()
    assert before.keys() == set(names[:5])
    ray.kill(growing.preparer)
    again = grow(source, corpus, tmp_path, num_parts_ahead=100).plan(seed=SEED, window_size=WINDOW)
    for part in ORDER:
        assert again.part(part)
    assert before.items() <= records().items()
    (Path(growing.directory) / "manifest.json").unlink()  # all parts are there, as where a preparation was killed
    whole = grow(source, corpus, tmp_path)
    plan = whole.plan(seed=SEED, window_size=WINDOW)
    assert plan.part(0)
    manifest = whole.latest()
    assert isinstance(manifest, Manifest)
    complete = manifest.plan(seed=SEED, window_size=WINDOW)
    assert complete.identity["archives"] == plan.identity["archives"]


def test_too_many_lost_records_end_the_reading(cluster: dict[str, str], corpus: Path, tmp_path: Path) -> None:
    for number in range(4):
        write_jsonl_zst(tmp_path / "data" / f"{number}.jsonl.zst", [f"abc def {number} gh"] * 40 + ["  "] * 2)
    text = grow(tmp_path / "data", corpus, tmp_path / "prepared", max_bad_share_field="data.max_bad_share")
    plan = text.plan(seed=SEED, window_size=WINDOW)
    stream = RankStream(source=BlockSource(manifest=text), plan=plan, batch_size=BATCH, rank=0, world_size=1)
    with pytest.raises(TooManyProblemsError, match=r"data\.max_bad_share = 1\.00%.*empty_document"):
        list(stream.batches(0, BATCH * 100))


def test_a_sentence_encoder_that_was_stopped_trains_as_if_its_text_had_been_prepared_ahead(
    cluster: dict[str, str], corpus: Path, wordpiece: Path, source: Path, tmp_path: Path
) -> None:
    """With two workers it lacks an archive in mid-epoch; with one worker and that archive it goes on."""

    def configure(storage: Path, *, num_workers: int = 1, **data: Any) -> SentenceConfig:
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

    expected = train(make_plan(configure(tmp_path / "ahead")))
    storage, missing = tmp_path / "streaming", source / f"{ORDER[8]:02}.jsonl"

    def take_away() -> None:
        wait_for(lambda: any(storage.glob("prepared/data-*/part-*.json")))
        shutil.move(missing, tmp_path / "away")

    with at_the_same_time(take_away), pytest.raises(FatalTrainingError, match=missing.name):
        train(make_plan(configure(storage, prepare="streaming", num_workers=2)))
    shutil.move(tmp_path / "away", missing)
    assert not any(storage.glob("prepared/data-*/manifest.json"))
    outcome = train(make_plan(configure(storage, prepare="streaming")))
    assert 5 <= outcome["resumed_from_step"] < 40
    assert outcome["batches_digest"] == expected["batches_digest"]
    assert history(outcome, "train/loss") == pytest.approx(history(expected, "train/loss"), abs=1e-4)
    for name in ("num_documents_train", "num_documents_too_short", "num_documents_lost", "num_epochs"):
        assert outcome[name] == expected[name]
    assert outcome["num_epochs"] > 1
