"""Writes archives of text in every format, and reads them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from pipelines.archives import list_archives
from pipelines.text.reading import Document, Problem, read_documents

TEXTS = [f"document {i}: " + "all work and no play \u2603 " * (i + 1) for i in range(8)]


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": t}).encode() + b"\n" for t in texts)


def zst(data: bytes, *, num_frames: int = 1, flush_lines: bool = False) -> bytes:
    """Compress to `num_frames` frames; with `flush_lines`, each line can be decompressed once its bytes are there."""
    records = data.splitlines(keepends=True)
    size = max(1, -(-len(records) // num_frames))
    frames = b""
    for start in range(0, max(1, len(records)), size):
        compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
        for record in records[start : start + size]:
            frames += compressor.compress(record)
            if flush_lines:
                frames += compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        frames += compressor.flush()
    return frames


def tar(members: Mapping[str, bytes] | Iterable[tuple[str, bytes]], **options: Any) -> bytes:
    """Return a tar of files; the options are those of `tarfile.open`, such as its format."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as file:
        for name, data in members.items() if isinstance(members, Mapping) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def parquet(columns: dict[str, object]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, row_group_size=3)
    return buffer.getvalue()


def read_file(path: Path, **options: str) -> tuple[list[Document], list[Problem]]:
    (archive,) = list_archives(str(path))
    items = list(read_documents(str(path), archive, **options))
    return [i for i in items if isinstance(i, Document)], [i for i in items if isinstance(i, Problem)]


WRITERS: dict[str, Callable[[list[str]], bytes]] = {
    "a.jsonl": lines,
    "a.jsonl.gz": lambda texts: gzip.compress(lines(texts)),
    "a.jsonl.zst": lambda texts: zst(lines(texts)),
    "frames.jsonl.zst": lambda texts: zst(lines(texts), num_frames=3),
    "a.jsonl.zst.tar": lambda texts: tar({"d/1.jsonl.zst": zst(lines(texts[:2])), "2.zst": zst(lines(texts[2:]))}),
    "b.tar": lambda texts: tar(
        {"1.jsonl": lines(texts[:1]), "readme": b"?", "2.jsonl.gz": gzip.compress(lines(texts[1:]))}
    ),
    "same_names.tar": lambda texts: tar([("1.jsonl", lines(texts[:1])), ("1.jsonl", lines(texts[1:]))]),
    "a.jsonl.xz": lambda texts: lzma.compress(lines(texts[:1])) + lzma.compress(lines(texts[1:])),
    "a.jsonl.bz2": lambda texts: bz2.compress(lines(texts)),
    "c4.json.gz": lambda texts: gzip.compress(lines(texts)),
    "gzip.tar": lambda texts: gzip.compress(tar({"1.jsonl": lines(texts)})),
    "zstd.tar": lambda texts: zstandard.compress(tar({"1.jsonl.xz": lzma.compress(lines(texts))})),
    "a.parquet": lambda texts: parquet({"id": list(range(len(texts))), "text": texts}),
}
