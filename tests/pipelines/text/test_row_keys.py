"""Test the keys of rows, which are the same whatever else a prepared text holds."""

from __future__ import annotations

import numpy as np

from pipelines.text.documents import DocumentConfig
from pipelines.text.manifest import ArchiveEntry, Manifest, ShardEntry

LAYOUT = DocumentConfig(least_num_tokens=1, vocab_size=10)


def archive(sizes: list[list[int]]) -> ArchiveEntry:
    """Return an archive with the given numbers of rows in the shards of its parts."""
    shards = [
        ShardEntry(file="", archive="", num_rows=size, num_tokens=0, digest="", part=part)
        for part, shards in enumerate(sizes)
        for size in shards
    ]
    return ArchiveEntry(
        path="", num_bytes=0, num_documents=0, problems={}, examples=[], shards=shards, num_parts=len(sizes)
    )


def keys(*archives: ArchiveEntry) -> list[int]:
    manifest = Manifest(directory="", tokenizer_digest="", layout=LAYOUT, archives=list(archives))
    shards = np.repeat(np.arange(len(manifest.shards)), manifest.shard_sizes)
    rows = np.concatenate([np.arange(size) for size in manifest.shard_sizes])
    return manifest.row_keys(shards, rows).tolist()


def test_a_key_depends_on_the_part_and_the_place_in_it_alone() -> None:
    found = keys(archive([[3, 2], [], [4]]), archive([[2, 1, 2]]))
    in_parts = [found[:5], found[5:9], found[9:]]
    assert in_parts[0] == [0, 1, 2, 3, 4]
    assert len(set(found)) == len(found)
    for part, number in zip(in_parts, (0, 2, 3), strict=True):
        assert [key - part[0] for key in part] == list(range(len(part)))
        assert part[0] == number << 32
    # Other rows in other parts change nothing.
    other = keys(archive([[7], [5, 5], [2, 2]]), archive([[5]]))
    assert other[17:21] == in_parts[1]
    assert other[21:] == in_parts[2]
