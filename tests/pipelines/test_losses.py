"""Tests of pipelines.losses: every lost record is listed, in the order of the archives, and the counts agree."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from pipelines.archives import list_archives
from pipelines.images.archives import list_image_archives
from pipelines.images.assembly import ASSEMBLY, assemble
from pipelines.images.caption_files import CaptionFile
from pipelines.images.decoding import MAX_PIXELS
from pipelines.images.index import index_archive, index_name
from pipelines.losses import list_losses, losses_name
from pipelines.text.manifest import archive_from_json
from pipelines.text.packing import PackingConfig
from pipelines.text.part_preparation import PartTask, list_archive_parts
from pipelines.text.tokenization import train_bpe

BAD = [b"<html>", b'{"body": 1}', b'{"text": "caf\xe9"}', b'{"text": ""}']
KINDS = ["invalid_json", "missing_text", "invalid_utf8", "empty_document"]


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_lost_document_is_listed(tmp_path: Path) -> None:
    source = tmp_path / "data"
    source.mkdir()
    for name in ("a", "b"):
        (source / f"{name}.jsonl").write_bytes(b'{"text": "good"}\n' + b"\n".join(BAD * 10))
    tokenizer = train_bpe(["good"], 300)
    archives = list_archives(str(source))
    task = PartTask(
        source=str(source),
        text_field="text",
        layout=PackingConfig.for_tokenizer(tokenizer, 32),
        tokenizer=tokenizer.backend_tokenizer,
        tokenizer_digest="",
        directory=str(tmp_path),
        parts=list_archive_parts(str(source), archives),
    )
    entries = [archive_from_json(task.run(number)) for number in (1, 0)]  # the order of the tasks does not matter
    list_losses(str(tmp_path), [losses_name(part.name) for part in task.parts], str(tmp_path / "all.jsonl"))
    losses = read(tmp_path / "all.jsonl")
    expected = [(kind, f"{name}.jsonl:{1 + place}") for name in ("a", "b") for place, kind in enumerate(KINDS * 10)]
    assert [(loss["kind"], loss["where"]) for loss in losses] == expected
    assert [Path(loss["archive"]).name for loss in losses] == ["a.jsonl"] * 40 + ["b.jsonl"] * 40
    assert all(loss["message"] for loss in losses)
    assert Counter(loss["kind"] for loss in losses) == sum((Counter(entry.problems) for entry in entries), Counter())


def test_every_lost_image_is_listed_and_what_only_all_archives_together_show(tmp_path: Path) -> None:
    source, prepared = tmp_path / "images", tmp_path / "prepared"
    source.mkdir()
    prepared.mkdir()
    for number in range(20):
        (source / f"{number}.jpg").write_bytes(b"no image")
    named = [{"image": f"{number}.jpg", "caption": "c"} for number in range(30)]
    (tmp_path / "captions.json").write_text(json.dumps(named))
    captions = CaptionFile.load(str(tmp_path / "captions.json"))
    (archive,) = list_image_archives(str(source))
    index = f"{prepared}/{index_name(0)}"
    entry = index_archive(str(source), archive, captions, max_pixels=MAX_PIXELS, index=index)
    manifest = assemble(
        [entry],
        captions,
        directory=str(prepared),
        source=str(source),
        captions_uri="captions.json",
        max_pixels=MAX_PIXELS,
    )
    list_losses(str(prepared), [losses_name(index_name(0)), losses_name(ASSEMBLY)], str(tmp_path / "all.jsonl"))
    losses = read(tmp_path / "all.jsonl")
    assert {(loss["kind"], loss["where"]) for loss in losses} == {
        ("corrupt_image" if number < 20 else "absent_image", f"{number}.jpg") for number in range(30)
    }
    assert Counter(loss["kind"] for loss in losses) == manifest.problems
