"""Test the preparation and streaming of text with Ray Data: what is kept, what is counted, and in which order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from support import write_jsonl_zst

from pipelines.plan import StreamPlan
from pipelines.problems import TooManyProblemsError
from pipelines.stream import RankStream
from pipelines.text.blocks import BlockSource, read_range
from pipelines.text.manifest import Manifest
from pipelines.text.packing import PackingConfig
from pipelines.text.prepare import PrepareConfig, prepare_text
from pipelines.text.tokenization import load_tokenizer

pytestmark = pytest.mark.cluster


def prepare(source: Path, corpus: Path, root: Path, **options: float) -> Manifest:
    config = PrepareConfig(source=str(source), tokenizer=str(corpus / "tokenizer"), **{"max_bad_share": 0.5, **options})
    layout = PackingConfig.for_tokenizer(load_tokenizer(config.tokenizer), 32)
    return prepare_text(config, layout, str(root), max_bad_share_field="data.max_bad_share")


def documents_of(blocks: dict[str, np.ndarray]) -> list[tuple[int, ...]]:
    """Return the documents in blocks in stored order, each as its targets, which end with the end-of-text token (0)."""
    targets = blocks["targets"][blocks["targets"] != -100]
    ends = np.flatnonzero(targets == 0)
    return [tuple(part.tolist()) for part in np.split(targets, ends + 1) if len(part)]


def test_two_epochs_over_two_workers_visit_every_document_once_in_different_orders(
    cluster: dict[str, str], corpus: Path, tmp_path: Path
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
    assert manifest.num_documents == len(texts)
    assert manifest.num_tokens == sum(map(len, expected))

    plan = StreamPlan(shard_sizes=manifest.shard_sizes, seed=3, window_size=100)
    size = manifest.num_rows
    batch_size = 8
    # Two epochs are read, and as many blocks of the third as fill the last batch.
    stop = -(-2 * size // batch_size) * batch_size
    seen: dict[int, np.ndarray] = {}
    for rank in range(2):
        stream = RankStream(
            source=BlockSource(manifest=manifest), plan=plan, batch_size=batch_size, rank=rank, world_size=2
        )
        for step, batch in enumerate(stream.batches(0, stop)):
            assert (batch["place"] // batch_size == step).all()
            assert len(batch["place"]) == 4
            seen |= dict(zip(batch["place"].tolist(), batch["input_ids"], strict=True))
    assert sorted(seen) == list(range(stop))

    # Each epoch holds every stored block once, and therefore every document once.
    def blocks_of(epoch: int) -> list[bytes]:
        return [seen[place].tobytes() for place in range(epoch * size, (epoch + 1) * size)]

    everything = sorted(row.tobytes() for row in stored["input_ids"])
    assert sorted(blocks_of(0)) == sorted(blocks_of(1)) == everything
    assert blocks_of(0) != blocks_of(1)

    # The batches are the same if one worker continues in mid-epoch, with two tasks that read its data at a time.
    cursor = (size // batch_size // 2) * batch_size
    alone = RankStream(
        source=BlockSource(manifest=manifest), plan=plan, batch_size=batch_size, rank=0, world_size=1,
        num_readers=2, num_batches_per_task=3, num_batches_per_output=2,
    )  # fmt: skip
    for batch in alone.batches(cursor, stop):
        for place, row in zip(batch["place"].tolist(), batch["input_ids"], strict=True):
            assert np.array_equal(row, seen[place])


def test_preparing_again_is_free_and_an_interrupted_one_goes_on(
    cluster: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    first = prepare(corpus / "train", corpus, tmp_path)
    directory = Path(first.directory)
    times = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    (directory / "manifest.json").unlink()
    (directory / "part-00001-00000.json").unlink()
    again = prepare(corpus / "train", corpus, tmp_path)
    assert again.digest == first.digest
    changed = {path.name for path in directory.iterdir() if times[path.name] != path.stat().st_mtime_ns}
    part = "part-00001-00000"
    assert changed == {"manifest.json", f"{part}.json", f"{part}-00000.arrow", f"{part}.losses.jsonl"}


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "truncated zst": ("truncated_archive", lambda data: data[: len(data) // 2]),
    "invalid UTF-8": ("invalid_utf8", lambda data: edit_line(data, b'{"text": "\xff\xfe"}')),
    "not JSON": ("invalid_json", lambda data: edit_line(data, b"this is no JSON")),
    "no text": ("missing_text", lambda data: edit_line(data, b'{"meta": {}}')),
    "empty document": ("empty_document", lambda data: edit_line(data, b'{"text": "  "}')),
    "empty archive": ("empty_archive", lambda data: zstandard.compress(b"")),
}


def edit_line(data: bytes, replacement: bytes) -> bytes:
    lines = zstandard.decompress(data).splitlines()
    lines[1] = replacement
    return zstandard.compress(b"\n".join(lines) + b"\n")


@pytest.mark.parametrize("name", DAMAGES)
def test_broken_data_costs_its_record_is_counted_and_named(
    cluster: dict[str, str], corpus: Path, tmp_path: Path, name: str
) -> None:
    kind, damage = DAMAGES[name]
    texts = [f"abc def {number} gh" for number in range(6)]
    write_jsonl_zst(tmp_path / "data" / "good.jsonl.zst", texts)
    write_jsonl_zst(tmp_path / "data" / "bad.jsonl.zst", [" ".join(np.random.default_rng(0).choice(texts, 500))] * 6)
    bad = tmp_path / "data" / "bad.jsonl.zst"
    bad.write_bytes(damage(bad.read_bytes()))
    manifest = prepare(tmp_path / "data", corpus, tmp_path / "prepared", max_bad_share=0.9)
    assert manifest.problems == {kind: 1}
    assert manifest.num_documents >= 6
    (loss,) = Path(manifest.directory).glob("part-00000-00000.losses.jsonl")
    assert [json.loads(line)["kind"] for line in loss.read_text().splitlines()] == [kind]
    # A stricter configuration refuses the same data with an error that names kind and archive.
    with pytest.raises(TooManyProblemsError, match=rf"data\.max_bad_share = 0\.00%.*bad\.jsonl\.zst.*{kind}"):
        prepare(tmp_path / "data", corpus, tmp_path / "prepared", max_bad_share=0.0)


def test_data_without_any_document_is_refused(cluster: dict[str, str], corpus: Path, tmp_path: Path) -> None:
    write_jsonl_zst(tmp_path / "data" / "a.jsonl.zst", [])
    with pytest.raises(TooManyProblemsError, match="holds no readable document"):
        prepare(tmp_path / "data", corpus, tmp_path / "prepared", max_bad_share=1.0)
