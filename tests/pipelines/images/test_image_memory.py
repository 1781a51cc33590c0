"""Tests of the memory of a process that decodes images: hostile ones are refused, the largest legal ones fit."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from pipelines.images.decoding import MAX_DECODING_BYTES, MAX_PIXELS
from pipelines.problems import ProblemKind

# This program reads images in every way, and prints the outcomes of each and the peak of the memory.
_READ = """
import json, sys
from pathlib import Path
import numpy as np
import pipelines.images.pairs  # all that a reader imports
from pipelines.images.decoding import ImageError, check_image
from pipelines.images.views import AugmentationConfig, evaluation_view, training_view

def outcome(read, data):
    try:
        read(data)
        return ""
    except ImageError as error:
        return error.kind

ways = (
    check_image,
    lambda data: training_view(data, 224, AugmentationConfig(), np.random.default_rng(0)),
    lambda data: evaluation_view(data, 224),
)
outcomes = [sorted({outcome(read, Path(path).read_bytes()) for read in ways}) for path in sys.argv[1:]]
(peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps([outcomes, int(peak) * 1024]))
"""


def read_in_a_child(directory: Path, images: list[bytes]) -> tuple[list[list[str]], int]:
    """Return the outcomes of all ways of reading each image, and the child's peak resident memory in bytes."""
    paths = [directory / str(number) for number in range(len(images))]
    for path, data in zip(paths, images, strict=True):
        path.write_bytes(data)
    child = subprocess.run([sys.executable, "-c", _READ, *paths], check=True, capture_output=True, text=True)
    outcomes, peak = json.loads(child.stdout)
    return outcomes, peak


def deflated_zeros(num_bytes: int) -> bytes:
    """Compress zeros quickly: a block that is flushed fully may be repeated."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, -15)
    block = compressor.compress(bytes(2**20)) + compressor.flush(zlib.Z_FULL_FLUSH)
    rest = zlib.compressobj(1, zlib.DEFLATED, -15)
    end = rest.compress(bytes(num_bytes % 2**20)) + rest.flush()
    checksum = (num_bytes % 65_521) << 16 | 1
    return b"\x78\x01" + block * (num_bytes // 2**20) + end + checksum.to_bytes(4, "big")


def png(width: int, height: int, *, depth: int, colour: int) -> bytes:
    """Return a PNG of zeros, of any size and depth (bits per channel)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    rows = deflated_zeros(height * (1 + (width * channels * depth + 7) // 8))
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in chunks)


def tiff(width: int, height: int, *, tile: int = 0) -> bytes:
    """Return a deflated 16-bit RGBA TIFF in one strip, or in tiles of the given width and length."""
    data = deflated_zeros((tile * tile or width * height) * 8)
    bits = 8 + len(data)
    tags = [(256, width), (257, height), (259, 8), (262, 2), (277, 4), (338, 2)]
    tags += (
        [(322, tile), (323, tile), (324, 8), (325, len(data))] if tile else [(273, 8), (278, height), (279, len(data))]
    )
    entries = [(tag, 4, 1, value) for tag, value in tags] + [(258, 3, 4, bits)]
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    return struct.pack("<2sHI", b"II", 42, bits + 8) + data + struct.pack("<4H", 16, 16, 16, 16) + directory + bytes(4)


def saved(mode: str, side: int, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (side, side)).save(buffer, form, **options)
    return buffer.getvalue()


def gif(side: int, *, num_frames: int) -> bytes:
    """Return a GIF with a large canvas, on which every frame is one pixel."""
    header = b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + bytes(3) + b"\xff" * 3
    frame = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return header + frame * num_frames + b";"


def side(bytes_per_pixel: int) -> int:
    """Return the side of the largest legal square image."""
    return int(min(MAX_PIXELS, 0.999 * MAX_DECODING_BYTES / bytes_per_pixel) ** 0.5)


LARGEST: dict[str, Callable[[], bytes]] = {
    "PNG, RGBA of 16 bits": lambda: png(side(8), side(8), depth=16, colour=6),
    "JPEG, progressive CMYK": lambda: saved("CMYK", side(12), "JPEG", progressive=True),
    "WebP, animated": lambda: saved(
        "RGBA", side(20), "WEBP", save_all=True, append_images=[Image.new("RGBA", (side(20),) * 2, "red")], method=0
    ),
    "TIFF, RGBA of 16 bits": lambda: tiff(side(16), side(16)),
    "GIF of 5000 frames": lambda: gif(4096, num_frames=5000),
}


# A quick one is enough for `make test`, which shows by the bombs that the limits hold.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith("GIF") else pytest.mark.long) for name in LARGEST]
)
def test_the_largest_legal_images_are_read_within_a_gigabyte(name: str, tmp_path: Path) -> None:
    outcomes, peak = read_in_a_child(tmp_path, [LARGEST[name]()])
    assert outcomes == [[""]]
    assert peak < 1e9


BOMBS: dict[str, tuple[Callable[[], bytes], ProblemKind]] = {
    "PNG, RGBA of 16 bits": (lambda: png(9000, 9000, depth=16, colour=6), ProblemKind.TOO_MANY_PIXELS),
    "PNG, a line of pixels": (lambda: png(1, 2**26, depth=8, colour=0), ProblemKind.TOO_MUCH_MEMORY),
    "JPEG, CMYK": (lambda: saved("CMYK", 8000, "JPEG"), ProblemKind.TOO_MUCH_MEMORY),
    "WebP": (lambda: saved("RGB", 6000, "WEBP", lossless=True, method=0), ProblemKind.TOO_MUCH_MEMORY),
    "GIF with a huge canvas": (lambda: gif(65_535, num_frames=3), ProblemKind.TOO_MANY_PIXELS),
    "TIFF with a huge tile": (lambda: tiff(16, 16, tile=8192), ProblemKind.TOO_MUCH_MEMORY),
}


def test_bombs_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    outcomes, peak = read_in_a_child(tmp_path, [make() for make, _ in BOMBS.values()])
    assert dict(zip(BOMBS, outcomes, strict=True)) == {name: [kind] for name, (_, kind) in BOMBS.items()}
    assert peak < 4e8
