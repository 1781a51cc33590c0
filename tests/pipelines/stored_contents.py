"""What the tests of object stores read: objects whose sizes lie around the bounds of blocks, and random ranges of them."""

from __future__ import annotations

import numpy as np

from pipelines.object_store import BLOCK_BYTES
from pipelines.ranges import ByteRange

# Sizes at and around the bounds of blocks; objects that are no longer than two blocks are one.
SIZES = {"empty": 0, "small": 1000, "large": 2 * BLOCK_BYTES - 1, "two": 2 * BLOCK_BYTES, "rest": 3 * BLOCK_BYTES + 777}
CONTENTS = {name: np.random.default_rng(size).bytes(size) for name, size in SIZES.items()}


def path(name: str) -> str:
    return f"bucket/data/{name}"


def random_ranges(count: int, seed: int = 0) -> list[ByteRange]:
    rng = np.random.default_rng(seed)
    names = [name for name, size in SIZES.items() if size]
    chosen = [names[number] for number in rng.integers(len(names), size=count)]
    return [ByteRange(path(name), int(rng.integers(SIZES[name])), int(rng.integers(300_000))) for name in chosen]


def expected(ranges: list[ByteRange]) -> list[bytes]:
    return [CONTENTS[part.path.split("/")[-1]][part.offset :][: part.size] for part in ranges]
