"""Read image–text pairs as training arrays, and images and captions as evaluation arrays, from a prepared data set.

A random view of an image is a pure function of (seed, epoch, pair id), and caption noise of (seed, pair id). Images are read
from their original location and compared with the checksums that were taken when the data set was prepared.

Shapes: n pairs in a batch, S pixels per side of a view, t tokens per caption, M images and N pairs in the data set.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from pipelines.images.captions import CaptionEncoder, CaptionNoise
from pipelines.images.decoding import ImageError
from pipelines.images.manifest import INDEX_SCHEMA, ImageManifest, read_index
from pipelines.images.views import AugmentationConfig, evaluation_view, training_view
from pipelines.ranges import ByteRange, gather_rows, range_reader
from pipelines.stream import Batch

Digest = TypeVar("Digest", int, np.ndarray)

# Keeps the random generators of image views distinct from those of the plan, which are keyed by (seed, epoch, window).
_VIEW_STREAM = 0x76696577
_NUM_OPEN_INDICES = 16


@dataclass(frozen=True, kw_only=True)
class PairSource:
    """Source of image–text pairs for a `RankStream`; it can be pickled, and opens files in the process that reads."""

    manifest: ImageManifest
    tokenizer: PreTrainedTokenizerFast | None = None
    """Tokenizer of the captions; None: they are not tokenised, and training reads images alone."""
    image_size: int
    """Side S of the square views, in pixels."""
    num_text_tokens: int = 30
    """Number t of tokens per caption, including special tokens and padding."""
    seed: int = 0
    """Seed of the random views and of the caption noise."""
    augmentation: AugmentationConfig | None = field(default_factory=AugmentationConfig)
    """Distribution of the random views that training reads; None: it reads the central view of every image."""
    num_views: int = 1
    """Number v of views of an image that training reads, drawn one after the other."""
    caption_noise: float = 0.0
    """Share of the captions that receive noise, in [0, 1] (`CaptionNoise`)."""
    cache_bytes: int = 0
    """Size of the node's cache of remote archives in bytes; 0: none, so that every image is a request of its own."""

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise ValueError(f"image_size = {self.image_size} must be at least 1")
        if self.tokenizer is not None:
            assert self.encoder  # Created here already, so that invalid values raise an error here.
        assert self.noise

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def encoder(self) -> CaptionEncoder:
        """Tokenizer of captions with a fixed output length t."""
        assert self.tokenizer is not None
        return CaptionEncoder(tokenizer=self.tokenizer, num_text_tokens=self.num_text_tokens)

    @cached_property
    def noise(self) -> CaptionNoise:
        """Noise that is added to captions."""
        return CaptionNoise(share=self.caption_noise, seed=self.seed)

    @cached_property
    def _index(self) -> Callable[[int], pa.Table]:
        return lru_cache(maxsize=_NUM_OPEN_INDICES)(partial(read_index, self.manifest))

    # ---- training ----

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return the training arrays of n pairs, given their shards and rows in the shards' indexes, each (n,).

        `images` (n, S, S, 3) uint8, or (n, v, S, S, 3) of several views; `ids`, `image_ids` (n,) int64, the pair ids
        0 … N−1 and the image numbers 0 … M−1; `digest` (n,) int64, a 48-bit hash of pixels and tokens. With a tokenizer
        also `input_ids`, `attention_mask` (n, t) int64; `is_noisy` (n,) bool, whether the caption received noise.
        """
        shards, rows = np.asarray(shards), np.asarray(rows)
        entries = self._entries(shards, rows)
        batch = self._captions(shards, rows, entries)
        count = len(rows)
        images = np.empty((count, self.num_views, self.image_size, self.image_size, 3), dtype=np.uint8)
        digests = np.empty(count, dtype=np.int64)
        for place, data in enumerate(self._image_files(shards, entries)):
            rng = np.random.default_rng([self.seed, _VIEW_STREAM, epoch, int(batch["ids"][place])])
            for number in range(self.num_views):
                if self.augmentation is None:
                    view = self._view(shards[place], rows[place], evaluation_view, data)
                else:
                    view = self._view(shards[place], rows[place], training_view, data, self.augmentation, rng)
                images[place, number] = view
            tokens = token_hash(batch["input_ids"][place]) if self.tokenizer is not None else 0
            digests[place] = pair_digest(pixel_hash(images[place]), tokens)
        return {"images": images[:, 0] if self.num_views == 1 else images, **batch, "digest": digests}

    def read_captions(self, shards: np.ndarray, rows: np.ndarray) -> Batch:
        """Return the arrays of :meth:`read` that belong to captions and ids, without reading an image."""
        return self._captions(shards, rows, self._entries(shards, rows))

    def _captions(self, shards: np.ndarray, rows: np.ndarray, entries: dict[str, pa.ChunkedArray]) -> Batch:
        ids = self.manifest.first_pairs[shards] + rows
        batch = {"ids": ids, "image_ids": entries["image"].to_numpy()}
        if self.tokenizer is None:
            return batch
        noised = [self.noise.apply(text, int(i)) for text, i in zip(entries["caption"].to_pylist(), ids, strict=True)]
        return {
            **self.encoder.encode([text for text, _ in noised]),
            **batch,
            "is_noisy": np.array([is_noisy for _, is_noisy in noised], dtype=bool),
        }

    def prefetch(self, *windows: Sequence[int]) -> None:
        """Fetch remote tars, given by their shards, into the node's cache (see `pipelines.stream.Source`)."""
        paths = [
            [shard.archive for shard in (self.manifest.shards[number] for number in shards) if not shard.is_directory]
            for shards in windows
        ]
        range_reader(self.manifest.source, self.cache_bytes).prefetch(*paths)

    def name(self, shard: int, row: int) -> str:
        """Return the key, the archive and the id of a pair, for messages."""
        return name_pair(self.manifest, self._index(int(shard)), int(shard), int(row))

    # ---- evaluation ----

    def read_images(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the images with these numbers (0 … M−1), resized and centre-cropped: (n, S, S, 3) uint8."""
        numbers = np.asarray(numbers, dtype=np.int64)
        shards = find_shards(numbers, self.manifest.first_images, "image")
        rows = np.empty_like(numbers)
        for shard in np.unique(shards):
            chosen = shards == shard
            rows[chosen] = np.searchsorted(self._index(int(shard)).column("image").to_numpy(), numbers[chosen])
        entries = self._entries(shards, rows)
        views = [
            self._view(shards[place], rows[place], evaluation_view, data)
            for place, data in enumerate(self._image_files(shards, entries))
        ]
        return np.stack(views) if views else np.empty((0, self.image_size, self.image_size, 3), dtype=np.uint8)

    def captions(self) -> tuple[list[str], np.ndarray]:
        """Return all captions, without added noise, in the order of pair ids, and (N,) the image number of each."""
        tables = [self._index(number) for number in range(len(self.manifest.shards))]
        texts = [text for table in tables for text in table.column("caption").to_pylist()]
        return texts, np.concatenate([table.column("image").to_numpy() for table in tables])

    def share_of_captions_cut(self, max_captions: int = 20_000, max_shards: int = 32) -> float:
        """Return the share of captions that have more than t tokens and are truncated, in [0, 1].

        It is measured on about `max_captions` captions from at most `max_shards` evenly spaced shards, which takes a second.
        """
        num_shards = min(len(self.manifest.shards), max_shards)
        chosen = np.unique(np.linspace(0, len(self.manifest.shards) - 1, num_shards).round().astype(int))
        texts = [
            text
            for number in chosen
            for text in self._index(int(number)).column("caption")[: -(-max_captions // num_shards)].to_pylist()
        ]
        return float(self.encoder.are_cut(texts).mean()) if texts else 0.0

    def locate(self, ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (shards, rows), each (n,), of the pairs with these ids (0 … N−1), in the form that `read` takes."""
        return locate_pairs(self.manifest, ids)

    # ---- reading ----

    def _entries(self, shards: np.ndarray, rows: np.ndarray) -> dict[str, pa.ChunkedArray]:
        """Return the index columns of n pairs, given their shards and rows, each (n,), in the same order."""
        table = INDEX_SCHEMA.empty_table()
        if len(shards):
            table = gather_rows(shards, rows, lambda s, r: self._index(s).take(pa.array(r, pa.int64())))
        return dict(zip(table.column_names, table.columns, strict=True))

    def _image_files(self, shards: np.ndarray, entries: dict[str, pa.ChunkedArray]) -> Iterator[bytes]:
        """Yield the stored bytes of the image of each index entry."""
        ranges = []
        columns = (entries[name].to_pylist() for name in ("member", "offset", "size"))
        for shard, member, offset, size in zip(shards, *columns, strict=True):
            entry = self.manifest.shards[shard]
            path = f"{entry.archive}/{member}" if entry.is_directory else entry.archive
            ranges.append(ByteRange(path, offset, size))
        files = range_reader(self.manifest.source, self.cache_bytes).stream(ranges)
        for place, (data, checksum) in enumerate(zip(files, entries["checksum"].to_pylist(), strict=True)):
            if zlib.crc32(data) != checksum:
                member = entries["member"][place].as_py()
                raise OSError(
                    f"{ranges[place].path} has changed since it was prepared: {member!r} is no longer "
                    f"{ranges[place].size} bytes at byte {ranges[place].offset}; prepare it again"
                )
            yield data

    def _view(
        self, shard: int, row: int, view: Callable[..., np.ndarray], data: bytes, *arguments: object
    ) -> np.ndarray:
        try:
            return view(data, self.image_size, *arguments, max_pixels=self.manifest.max_pixels)
        except ImageError as error:  # The image must have changed, since it could be decoded when it was prepared.
            raise OSError(f"{self.name(shard, row)} cannot be decoded: {error}; prepare it again") from error


def find_shards(numbers: np.ndarray, firsts: np.ndarray, noun: str) -> np.ndarray:
    """Return the shard of each of n numbers of pairs or images (`noun`); a number that does not exist raises IndexError.

    `firsts` (shards + 1,) has the first number of every shard and the total.
    """
    beyond = numbers[(numbers < 0) | (numbers >= firsts[-1])]
    if len(beyond):
        raise IndexError(f"{noun} {beyond[0]} does not exist: the data set has {noun}s 0 … {firsts[-1] - 1}")
    return np.searchsorted(firsts, numbers, side="right") - 1


def locate_pairs(manifest: ImageManifest, ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (shards, rows), each (n,), of the pairs with these ids; see :meth:`PairSource.locate`."""
    ids = np.asarray(ids, dtype=np.int64)
    shards = find_shards(ids, manifest.first_pairs, "pair")
    return shards, ids - manifest.first_pairs[shards]


def name_pair(manifest: ImageManifest, index: pa.Table, shard: int, row: int) -> str:
    """Return the key, the archive and the id of a pair, given the index of its shard."""
    pair = int(manifest.first_pairs[shard]) + row
    return f"{index.column('key')[row].as_py()!r} of {manifest.shards[shard].archive} (pair {pair})"


def pixel_hash(image: np.ndarray) -> int:
    """Return a 32-bit hash of the pixels of a view, CRC-32 because it is fastest."""
    return zlib.crc32(image.data)


def token_hash(input_ids: np.ndarray) -> int:
    """Return a 16-bit hash of the tokens (t,) of a caption."""
    return int.from_bytes(hashlib.blake2b(input_ids.tobytes(), digest_size=2).digest(), "little")


def pair_digest(pixels: Digest, tokens: Digest) -> Digest:
    """Return the 48-bit hash of a pair, or of n pairs (n,) int64, from those of its pixels and tokens."""
    return pixels << 16 | tokens
