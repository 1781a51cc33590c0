"""The sample text, on a small made-up site: only prose is found, once, and a second run gives the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pipelines.archives import list_archives
from pipelines.sample import text as sample_text
from pipelines.sample.text import collect_prose, write_corpus
from pipelines.text.reading import Document, read_documents

LONG = "The tide came in over the flats and the boats that had lain on their sides were lifted one after the other. "


def sentence(number: int) -> str:
    return f"In the winter of the year {number} there were many of them who did not come back from the sea."


def write(root: Path, name: str, content: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(content, encoding="utf-8")


def prose(root: Path, name: str, content: str) -> list[str]:
    """Return the paragraphs found in one file; LONG is added to the file and left out of the result."""
    write(root, name, content)
    (document,) = collect_prose(roots=[root])
    assert document.source == name
    return [paragraph for paragraph in document.text.split("\n\n") if not paragraph.startswith("The tide")]


MARKUP = {
    "heading and wrapped lines": (
        "The name of the ship\n====\n\nIt was one\nof the last.",
        ["The name of the ship", "It was one of the last."],
    ),
    "parameters": (
        "Parameters\n----------\nx : array of the shape\n    The first of the axes\n    to be drawn.\n\n"
        ":param int y: The second\n    of the axes.\n:returns: One of the axes.\n"
        "    z (`int`, *optional*): What is left\n        of them.\n",
        ["The first of the axes to be drawn.", "The second of the axes.", "One of the axes.", "What is left of them."],
    ),
    "inline": (
        "See :class:`~sea.Boat`, the *first* of ``two``, `the log <http://x.y>`_ and [the map](http://x.y/a_b) [1]_.",
        ["See sea.Boat, the first of two, the log and the map."],
    ),
    "code blocks": (
        "This is how it is done::\n\n    the_end_of = the.world\n    and it is not in the text\n\nAnd this is after it."
        "\n\n```python\nthis is in a block of the code\n```\n\n.. code-block:: python\n\n    this is in it\n\n"
        ".. note::\n    This is a note to the reader.",
        ["This is how it is done:", "And this is after it.", "This is a note to the reader."],
    ),
    "not prose": (
        "x = f(y) + g(z) - the[of] * 3.14159 / (a - b)\n\nBoats, ships, harbours, quays, sails, masts, oars, ropes.\n\n"
        "Der Hund ist in dem Garten und schläft.\n\nIt is this that is kept of it.",
        ["It is this that is kept of it."],
    ),
    "legal": ("Permission is hereby granted to all of us.\n\nCopyright (c) the authors of this.\n\nIt is free of it.",
              ["It is free of it."]),
}  # fmt: skip


@pytest.mark.parametrize("case", MARKUP)
@pytest.mark.parametrize("name", ["a.rst", "a.py"])
def test_markup_is_taken_out_and_prose_is_kept(case: str, name: str, tmp_path: Path) -> None:
    text, expected = MARKUP[case]
    text = f"{LONG}\n{LONG}\n\n{text}\n"
    if name == "a.py":
        text = 'def f():\n    r"""' + text.replace("\n", "\n    ") + '"""\n'
    assert prose(tmp_path, name, text) == expected


def test_a_paragraph_is_kept_once_and_short_documents_are_dropped(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path, f"{name}.md", f"{LONG * 2}\n\n{LONG.upper()}\n\nThis is what is only in the file {name * 200}.")
    write(tmp_path, "e.md", "This is all of it.")
    (tmp_path / "f.md").write_bytes(b"It is not in UTF-8: \xff and so it is not read. " * 10)
    documents = list(collect_prose(roots=[tmp_path]))
    assert {document.source for document in documents} == {"a.md", "b.md", "c.md"}
    paragraphs = [paragraph.lower() for document in documents for paragraph in document.text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs)) >= 4
    assert all(len(document.text) >= sample_text.MIN_DOCUMENT_CHARACTERS for document in documents)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    root = tmp_path / "site"
    for number in range(1, 151):
        write(root, f"package_{number % 10}/m{number}.md", "\n\n".join(sentence(number * 5 + i) for i in range(5)))
    return root


def test_the_cap_keeps_a_prefix_that_is_a_mixture(site: Path) -> None:
    everything = list(collect_prose(roots=[site]))
    sizes = [len(document.text.encode()) for document in everything]
    limit = sum(sizes) // 3
    some = list(collect_prose(num_bytes=limit, roots=[site]))
    assert some == everything[: len(some)]
    assert limit - max(sizes) < sum(sizes[: len(some)]) <= limit
    assert len({document.source.split("/")[0] for document in some}) >= 8
    assert list(collect_prose(num_bytes=sum(sizes), roots=[site])) == everything


def test_the_corpus_is_readable_complete_split_by_text_and_the_same_again(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_text, "NUM_BYTES_PER_MEMBER", 20_000)
    (tmp_path / "again").mkdir()
    contents = []
    for name in ("deep/corpus", "again"):
        summary = write_corpus(tmp_path / name, num_shards=2, roots=[site])
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    assert contents[0] == contents[1]
    assert list(contents[0]) == [
        "train/prose-00000.jsonl.zst.tar",
        "train/prose-00001.jsonl.zst.tar",
        "validation/prose-00000.jsonl.zst",
    ]
    found: dict[str, list[Document]] = {}
    for split in ("train", "validation"):
        uri = str(tmp_path / "again" / split)
        items = [item for archive in list_archives(uri) for item in read_documents(uri, archive)]
        found[split] = [item for item in items if isinstance(item, Document)]
        assert len(found[split]) == len(items)
        for document in found[split]:
            digest = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
            assert (int.from_bytes(digest, "big") % 50 == 0) == (split == "validation")
    members = {document.key.rpartition(":")[0] for document in found["train"]}
    assert len(members) > 2, "an archive holds several members"
    texts = {split: [document.text for document in documents] for split, documents in found.items()}
    expected = collect_prose(roots=[site])
    assert sorted(texts["train"] + texts["validation"]) == sorted(document.text for document in expected)
    assert [summary.num_documents_train, summary.num_documents_validation] == [len(t) for t in texts.values()]
    num_bytes = [sum(len(text.encode()) for text in t) for t in texts.values()]
    assert [summary.num_bytes_train, summary.num_bytes_validation] == num_bytes


def test_what_cannot_be_done_leaves_everything_as_it_was(site: Path, tmp_path: Path) -> None:
    write(tmp_path, "precious/file.txt", "x")
    before = sorted(tmp_path.rglob("*"))
    for directory, options, error in (
        ("corpus", {"num_bytes": 600}, "num_bytes = 600 leaves no document for the"),
        ("corpus", {"num_bytes": 0}, "num_bytes is 0"),
        ("corpus", {"num_shards": 0}, "num_shards is 0"),
        ("corpus", {"roots": [tmp_path / "nowhere"]}, "nowhere"),
        ("precious", {}, "precious"),
    ):
        with pytest.raises((ValueError, OSError), match=error):
            write_corpus(tmp_path / directory, **{"roots": [site], **options})
        assert sorted(tmp_path.rglob("*")) == before
