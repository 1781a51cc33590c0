"""Tests of pipelines.sample on a small made-up site: only prose is found, and a second run gives the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pipelines.archives import list_archives
from pipelines.sample import text as sample_text
from pipelines.sample.text import ProseDocument, collect_prose, default_roots, write_corpus
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


def test_docstrings_are_found_and_other_strings_are_not(tmp_path: Path) -> None:
    code = f'''# a comment
"""{LONG}
{LONG}
"""
from x import y
TEMPLATE = """This is a template and not the documentation of it."""
run("a", """
This is an argument and not the documentation of it.""",
    b"""This is an argument and not the documentation of it.""")

class Boat(Base[int]):
    """A boat that is tied
    to the quay."""

    def sail(self,
             to: str) -> None:  # noqa
        r\'\'\'Sail to the harbour
        that is named.

        >>> boat.sail("the end of the world and of the sea")
        This is what is printed by the call of it.
        And there is more that is printed by the call of it, which is not in the text that is kept.

        And so it is done.
        \'\'\'
        return """This is a value and not the documentation of it."""
    #: x
    speed: float = 3.0
    """The speed of the boat over the ground."""
    def f(self):
        f"""This is formatted and not the documentation of it."""
'''
    found = prose(tmp_path, "boat.py", code)
    assert found == [
        "A boat that is tied to the quay.",
        "Sail to the harbour that is named.",
        "And so it is done.",
        "The speed of the boat over the ground.",
    ]


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
    "tables": ("+---+\n| it is in the table |\n+===+\n\n| this | is in | the | other |\n\nIt is not in the table.",
               ["It is not in the table."]),
    "lists": ("- the first of them\n  goes on here\n- the second of them\n1. and it is a third",
              ["the first of them goes on here", "the second of them", "and it is a third"]),
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


def test_only_documentation_files_are_read(tmp_path: Path) -> None:
    kept = ["a.md", "b/c.rst", "d.txt", "x-1.0.dist-info/METADATA", "e.py"]
    dropped = [
        "LICENSE.txt", "x-1.0.dist-info/licenses/d.txt", "COPYING.md", "x-1.0.dist-info/top_level.txt",
        "requirements-dev.txt", "NOTICE.txt", "__pycache__/a.md", ".hidden/a.md", "site-packages/a.md", "a.json",
        "x-1.0.dist-info/RECORD", "x-1.0.dist-info/entry_points.txt",
    ]  # fmt: skip
    for number, name in enumerate(kept + dropped):
        text = "\n\n".join(sentence(number * 10 + i) for i in range(1, 6))
        if name.endswith("METADATA"):
            text = f"Name: x\nSummary: This is the summary of it, and it is not in the text.\n\n{text}"
        write(tmp_path, name, f'"""{text}"""\n' if name.endswith(".py") else text)
    documents = {document.source: document.text for document in collect_prose(roots=[tmp_path])}
    assert sorted(documents) == sorted(kept)
    assert "summary" not in documents["x-1.0.dist-info/METADATA"]


def test_a_paragraph_is_kept_once_and_short_documents_are_dropped(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path, f"{name}.md", f"{LONG * 2}\n\n{LONG.upper()}\n\nThis is what is only in the file {name * 200}.")
    write(tmp_path, "d.md", f"{LONG}\n{LONG}\n\nThis is the only thing that is new.")
    write(tmp_path, "e.md", "This is all of it.")
    (tmp_path / "f.md").write_bytes(b"It is not in UTF-8: \xff and so it is not read. " * 10)
    documents = list(collect_prose(roots=[tmp_path]))
    paragraphs = [paragraph.lower() for document in documents for paragraph in document.text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs)) >= 4
    assert {document.source for document in documents} - {"d.md"} == {"a.md", "b.md", "c.md"}
    assert all(len(document.text) >= sample_text.MIN_DOCUMENT_CHARACTERS for document in documents)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    root = tmp_path / "site"
    for number in range(1, 151):
        write(root, f"package_{number % 10}/m{number}.md", "\n\n".join(sentence(number * 5 + i) for i in range(5)))
    return root


def test_the_cap_keeps_a_prefix_that_is_a_mixture(site: Path) -> None:
    everything = list(collect_prose(roots=[site]))
    total = sum(len(document.text.encode()) for document in everything)
    some = list(collect_prose(num_bytes=total // 3, roots=[site]))
    num_bytes = sum(len(document.text.encode()) for document in some)
    assert some == everything[: len(some)]
    assert total // 3 - max(len(document.text.encode()) for document in everything) < num_bytes <= total // 3
    assert len({document.source.split("/")[0] for document in some}) >= 8
    assert list(collect_prose(num_bytes=total, roots=[site])) == everything


def test_the_corpus_is_readable_complete_and_split_by_text(site: Path, tmp_path: Path) -> None:
    expected = list(collect_prose(roots=[site]))
    summary = write_corpus(tmp_path / "deep" / "corpus", num_shards=3, roots=[site])
    texts: dict[str, list[str]] = {}
    for split in ("train", "validation"):
        uri = str(tmp_path / "deep" / "corpus" / split)
        items = [item for archive in list_archives(uri) for item in read_documents(uri, archive)]
        assert all(isinstance(item, Document) for item in items)
        texts[split] = [item.text for item in items if isinstance(item, Document)]
    assert sorted(texts["train"] + texts["validation"]) == sorted(document.text for document in expected)
    assert [summary.num_documents_train, summary.num_documents_validation] == [len(t) for t in texts.values()]
    assert [summary.num_bytes_train, summary.num_bytes_validation] == [
        sum(len(text.encode()) for text in t) for t in texts.values()
    ]
    for split, chosen in texts.items():
        for text in chosen:
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            assert (int.from_bytes(digest, "big") % 50 == 0) == (split == "validation")


def test_the_same_site_gives_the_same_bytes(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_text, "NUM_BYTES_PER_MEMBER", 20_000)
    contents = []
    for name in ("one", "two"):
        write_corpus(tmp_path / name, num_shards=2, roots=[site])
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    assert contents[0] == contents[1]
    assert list(contents[0]) == [
        "train/prose-00000.jsonl.zst.tar",
        "train/prose-00001.jsonl.zst.tar",
        "validation/prose-00000.jsonl.zst",
    ]
    uri = str(tmp_path / "one" / "train")
    keys = [item.key for item in read_documents(uri, list_archives(uri)[0]) if isinstance(item, Document)]
    assert len({key.rpartition(":")[0] for key in keys}) > 1, "an archive holds several members"


def test_a_failure_leaves_nothing_behind(site: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="num_bytes = 600 leaves no document for the"):
        write_corpus(tmp_path / "corpus", num_bytes=600, roots=[site])
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_there_is_not_overwritten(site: Path, tmp_path: Path) -> None:
    write(tmp_path, "corpus/precious.txt", "x")
    with pytest.raises(FileExistsError, match="corpus"):
        write_corpus(tmp_path / "corpus", roots=[site])
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["precious.txt"]
    (tmp_path / "empty").mkdir()
    write_corpus(tmp_path / "empty", roots=[site])
    assert (tmp_path / "empty" / "train").is_dir()


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_bytes is 0"):
        next(collect_prose(num_bytes=0, roots=[tmp_path]))
    with pytest.raises(ValueError, match="num_shards is 0"):
        write_corpus(tmp_path / "corpus", num_shards=0, roots=[tmp_path])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        next(collect_prose(roots=[tmp_path / "nowhere"]))


def test_the_running_environment_has_prose() -> None:
    assert all(root.is_dir() for root in default_roots())
    documents = list(collect_prose(num_bytes=100_000))
    assert isinstance(documents[0], ProseDocument)
    assert sum(len(document.text.encode()) for document in documents) > 10_000
