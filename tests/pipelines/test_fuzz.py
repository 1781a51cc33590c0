"""Tests of every reader on damaged files: it soon gives records and problems, or a clear error, in less than a gigabyte.

All 10 000 mutations are run by `python -m pytest -m long tests/pipelines/test_fuzz.py`.
One of them is run by `PYTHONPATH=.:tests/cluster python tests/pipelines/test_fuzz.py DIRECTORY NUMBER NUMBER+1`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from PIL import Image
from text_archive_support import tar

from pipelines.archives import list_archives
from pipelines.images.archives import ImageSample, LeftOut, list_image_archives, read_samples
from pipelines.images.captions import CaptionFile
from pipelines.images.decoding import ImageError, check_image
from pipelines.images.views import AugmentationConfig, evaluation_view, training_view
from pipelines.problems import Problem
from pipelines.text.reading import read_documents

SEED = 20_240_404
MAX_MEMORY_BYTES = 10**9
SECONDS_PER_CASE = 20

# ---- intact files ----------------------------------------------------------------------------------------------------

TEXTS = [f"document {number}: all work and no play \u2603 " * (number + 1) for number in range(12)]
LINES = b"".join(json.dumps({"text": text, "meta": {"n": [1.5, None]}}).encode() + b"\n" for text in TEXTS)


def image(form: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 20, 3), dtype=np.uint8)).save(buffer, form)
    return buffer.getvalue()


def parquet(**options: object) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), buffer, row_group_size=5, **options)
    return buffer.getvalue()


LONG = "d/" * 80
TEXT_MEMBERS = {"1.zst": zstandard.compress(LINES), f"{LONG}2.jsonl.gz": gzip.compress(LINES), "\u2603.jsonl": LINES}
IMAGE_MEMBERS = {
    f"{directory}{number}.{suffix}": data
    for number, (directory, form) in enumerate([("", "jpeg"), (LONG, "png"), ("\u2603", "webp")])
    for suffix, data in {form: image(form), "txt": b"a caption", "json": b'{"caption": ["one", "two"]}'}.items()
}

# ---- readers ---------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> Counter[str]:
    (archive,) = list_archives(str(path))
    return counted(read_documents(str(path), archive))


def read_images(path: Path, captions: CaptionFile | None = None) -> Counter[str]:
    found = list_image_archives(str(path))
    return sum((counted(read_samples(str(path), archive, captions)) for archive in found), Counter())


def read_directory(path: Path) -> Counter[str]:
    folder = path.with_suffix("")
    folder.mkdir()
    path.rename(folder / "0.jpg")
    (folder / "1.jpg").write_bytes(image("jpeg"))
    return read_images(folder, CaptionFile(captions={"0.jpg": ("one",), "1.jpg": ("two",)}))


def counted(items: Iterable[Any]) -> Counter[str]:
    """Count the items by kind, and check that everything that a person is shown can be printed."""
    counts: Counter[str] = Counter()
    for item in items:
        if isinstance(item, LeftOut):
            item.kind.encode()
            continue
        shown = [item.where, item.detail] if isinstance(item, Problem) else [item.key]
        assert max(len(" ".join(shown).encode()), 1) < 200_000
        counts[item.kind if isinstance(item, Problem) else "read"] += 1
        if isinstance(item, ImageSample):
            " ".join(item.captions).encode()
            try:
                check_image(item.data, 2**20)
            except ImageError as error:
                str(error).encode()
            else:
                evaluation_view(item.data, 16)
                training_view(item.data, 16, AugmentationConfig(), np.random.default_rng(0))
        elif not isinstance(item, Problem):
            item.text.encode()
    return counts


Reader = Callable[[Path], Counter[str]]
# Name, intact content and reader; the name tells what is compressed after it is damaged.
CASES: list[tuple[str, bytes, Reader]] = [
    ("within.jsonl.gz", LINES, read_text),
    ("within.jsonl.zst", LINES, read_text),
    ("a.jsonl", LINES, read_text),
    ("a.jsonl.gz", gzip.compress(LINES), read_text),
    ("a.jsonl.zst", zstandard.ZstdCompressor(write_checksum=True).compress(LINES), read_text),
    ("pax.tar", tar(TEXT_MEMBERS, format=tarfile.PAX_FORMAT), read_text),
    ("gnu.tar", tar(TEXT_MEMBERS, format=tarfile.GNU_FORMAT), read_text),
    ("snappy.parquet", parquet(), read_text),
    ("plain.parquet", parquet(use_dictionary=False, compression="none"), read_text),
    ("zstd.parquet", parquet(compression="zstd", data_page_version="2.0"), read_text),
    ("i-pax.tar", tar(IMAGE_MEMBERS, format=tarfile.PAX_FORMAT), read_images),
    ("i-gnu.tar", tar(IMAGE_MEMBERS, format=tarfile.GNU_FORMAT), read_images),
    *[(f"{form}.jpg", image(form), read_directory) for form in ("jpeg", "png", "webp", "gif", "bmp")],
]


# ---- mutations -------------------------------------------------------------------------------------------------------


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Apply one to four changes: overwritten, flipped, inserted, cut or doubled bytes, a cut end, or another file’s head."""
    for _ in range(rng.integers(1, 5)):
        start = int(rng.integers(len(data) + 1))
        stop = start + int(rng.choice([1, 8, 512, max(len(data) // 3, 1)]))
        noise = rng.choice([rng.bytes(8), b"\0" * 8, b"\xff" * 8, b"9" * 64, b'{"[' * 9, rng.bytes(512)])
        match rng.integers(8):
            case 0:
                data = data[:start] + noise + data[start + len(noise) :]
            case 1:
                flipped = bytes(byte ^ 1 << int(rng.integers(8)) for byte in data[start : start + 2])
                data = data[:start] + flipped + data[start + 2 :]
            case 2:
                data = data[:start] + noise + data[start:]
            case 3:
                data = data[:start] + data[stop:]
            case 4:
                data = data[:stop] + data[start:stop] * int(rng.choice([1, 50])) + data[stop:]
            case 5:
                data = data[:start]
            case 6:
                other = CASES[rng.integers(len(CASES))][1]
                data = other[: stop - start] + data[stop - start :]
            case 7:
                data = with_changed_header(data, start // 512 * 512, rng)
    return data


def with_changed_header(data: bytes, at: int, rng: np.random.Generator) -> bytes:
    """Give a block of a tar another type and size, and the correct checksum of a header."""
    block = bytearray(data[at : at + 512].ljust(512, b"\0"))
    block[156] = rng.choice(list(b"0\0LKxgS12567XV"))
    sizes = [b"%011o\0" % 600, b"%011o\0" % (2**33 - 1), b"\xff" * 12, b"\x80" + b"\0" * 3 + b"\x7f" * 8]
    block[124:136] = sizes[rng.integers(len(sizes))]
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return data[:at] + bytes(block) + data[at + 512 :]


def run_cases(directory: Path, first: int, end: int) -> None:
    """Run cases; a hang ends the process by SIGALRM, and the last line says which case it was."""
    counts: Counter[str] = Counter()
    for number in range(first, end):
        rng = np.random.default_rng([SEED, number])
        name, data, read = CASES[number % len(CASES)]
        path = directory / f"{number}-{name}"
        damaged = mutated(data, rng)
        if name.startswith("within"):
            damaged = gzip.compress(damaged) if name.endswith("gz") else zstandard.compress(damaged)
        path.write_bytes(damaged)
        print(f"case {number} {name}", flush=True)
        signal.alarm(SECONDS_PER_CASE)
        counts |= Counter(dict.fromkeys(read(path), 1))
        signal.alarm(0)
        peak = int(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
        assert peak < MAX_MEMORY_BYTES, f"{peak} bytes"
    print(json.dumps({"kinds": sorted(counts), "peak_bytes": peak}))


LONG_RUNS = [pytest.param(first, first + 1000, marks=pytest.mark.long) for first in range(0, 10_000, 1000)]


@pytest.mark.parametrize(("first", "end"), [(0, 200), *LONG_RUNS])
def test_a_reader_survives_damage(tmp_path: Path, first: int, end: int) -> None:
    command = [sys.executable, __file__, tmp_path, str(first), str(end)]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests' / 'cluster'}"}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    last = process.stdout.splitlines()[-1:]
    assert process.returncode == 0, f"exit status {process.returncode} at {last}\n{process.stderr[-4000:]}"
    kinds = json.loads(last[0])["kinds"]
    assert {"read", "truncated_archive", "unreadable_archive", "invalid_json"} <= set(kinds)


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), *map(int, sys.argv[2:]))
