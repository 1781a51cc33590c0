"""Stored embeddings of prepared pairs: what the frozen towers of a dual encoder compute of images and captions.

There is one embedding for every image, of its central view (`pipelines.images.views.evaluation_view`), and one for every
caption, with its noise if there is any: an image with several captions is as many pairs, as in training on the towers.
Embeddings are float32. A similarity is divided by temperatures down to .005, so that the rounding of bfloat16, up to .004
of a cosine, would change exp(similarity/τ) by factors of two; and the room is small in any case. With embeddings of d
numbers an image takes 4d + 4 bytes and a caption 4d + 10: beside the embedding, a hash of the view's pixels; and the number
of the caption's image and a hash of its tokens. The two hashes give the digest that the pair has in training on the towers.

Shapes: n pairs, d dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines import feature_files
from pipelines.feature_files import FILE_BYTES, Column, FeatureFiles, describe_bytes
from pipelines.images.manifest import ImageManifest, read_index
from pipelines.images.pairs import locate_pairs, name_pair, pair_digest
from pipelines.storage import read_manifest, write_manifest
from pipelines.stream import Batch

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEmbeddings:
    """Description of the stored embeddings of a data set of pairs."""

    directory: str
    """Path or URI of the directory of the embeddings."""
    pairs: ImageManifest
    """The prepared pairs."""
    embedding_size: int
    """d, the number of dimensions."""
    image_size: int
    """Side of the views in pixels; a file holds no more images than have views that fit into memory together."""
    num_text_tokens: int
    """Number of tokens of a caption, which bounds the captions of a file likewise."""

    @property
    def images(self) -> FeatureFiles:
        """The files with a row for every image."""
        columns = self._embedding, Column(name="pixel_hash", dtype=np.uint32)
        sizes = tuple(shard.num_images for shard in self.pairs.shards)
        return self._files("images", sizes, columns, 3 * self.image_size**2)

    @property
    def captions(self) -> FeatureFiles:
        """The files with a row for every caption, that is, for every pair."""
        columns = (
            self._embedding,
            Column(name="image", dtype=np.int64),
            Column(name="token_hash", dtype=np.uint16),
        )
        num_input_bytes = 2 * 8 * self.num_text_tokens  # tokens and mask
        return self._files("captions", self.pairs.shard_sizes, columns, num_input_bytes)

    @property
    def _embedding(self) -> Column:
        return Column(name="embedding", dtype=np.float32, shape=(self.embedding_size,))

    def _files(
        self, name: str, sizes: tuple[int, ...], columns: tuple[Column, ...], num_input_bytes: int
    ) -> FeatureFiles:
        num_bytes = max(num_input_bytes, sum(column.num_bytes for column in columns))
        return FeatureFiles(
            directory=self.directory,
            name=name,
            noun=name,
            shard_sizes=sizes,
            columns=columns,
            rows_per_file=max(1, FILE_BYTES // num_bytes),
        )

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all embeddings."""
        return self.images.num_bytes + self.captions.num_bytes

    def describe_size(self) -> str:
        """Return how much the embeddings take, in total, and of an image and a caption."""
        return (
            f"{describe_bytes(self.num_bytes)}: {self.pairs.num_images:,} images × {self.images.bytes_per_row:,} bytes and "
            f"{self.pairs.num_pairs:,} captions × {self.captions.bytes_per_row:,} bytes "
            f"(embeddings of {self.embedding_size} in float32, of the central view of every image)"
        )

    def save(self, base_digest: str) -> None:
        """Write the manifest, whose presence marks the embeddings as complete."""
        content = {
            "version": _VERSION,
            "embeddings": {
                "embedding_size": self.embedding_size,
                "image_size": self.image_size,
                "num_text_tokens": self.num_text_tokens,
                "base_digest": base_digest,
            },
            "pairs": self.pairs.directory,
            "pairs_digest": self.pairs.digest,
        }
        write_manifest(self.directory, content)

    @classmethod
    def load(cls, directory: str, pairs: ImageManifest) -> PairEmbeddings:
        """Read the manifest of embeddings that were prepared for a data set of pairs.

        Raises:
            FileNotFoundError: if the embeddings are missing or not complete.
            ValueError: if they belong to other pairs, or were written by another version.
        """
        content = read_manifest(directory, noun="embeddings", field="embeddings", version=_VERSION)
        if content["pairs_digest"] != pairs.digest:
            raise ValueError(f"{directory} holds the embeddings of other pairs: prepare them again")
        sizes = {name: value for name, value in content["embeddings"].items() if name != "base_digest"}
        return cls(directory=directory, pairs=pairs, **sizes)

    def read_held_out(self, num_images: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the embeddings of the first images (num_images, d) and of all m captions of these (m, d), for validation.

        The third array, (m,), has the number of the image that each caption belongs to.
        """
        images = self.images.read(*self.images.places(0, num_images))
        captions = self.captions.read(*self.captions.places(0, self.pairs.num_pairs))
        chosen = captions["image"] < num_images
        return images["embedding"], captions["embedding"][chosen], captions["image"][chosen]


def embeddings_directory(root: str, pairs: ImageManifest, **settings: object) -> str:
    """Return the directory of the embeddings of a data set of pairs.

    Args:
        root: directory or URI of prepared data.
        pairs: the prepared pairs.
        settings: what determines the embeddings: the digests of encoder and tokenizer, the precision, and so on.
    """
    return feature_files.features_directory(root, _VERSION, pairs.digest, {"kind": "pairs", **settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSource:
    """Source of the stored embeddings of pairs (see `pipelines.stream.Source`)."""

    embeddings: PairEmbeddings
    """The embeddings."""
    cache_bytes: int = 0
    """Size of the node's cache of remote files in bytes; 0: none."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return the training arrays of n pairs, which do not depend on the epoch.

        Returns:
            `image_embeddings`, `text_embeddings` (n, d) float32; `ids`, `image_ids` and `digest` (n,) int64 are those of
            `pipelines.images.pairs.PairSource.read` without augmentation.
        """
        stored, pairs = self.embeddings, self.embeddings.pairs
        captions = stored.captions.read(shards, rows, cache_bytes=self.cache_bytes)
        image_rows = (
            captions["image"] - pairs.first_images[shards]
        )  # The pairs of an image are in the shard of the image.
        images = stored.images.read(shards, image_rows, cache_bytes=self.cache_bytes)
        return {
            "image_embeddings": images["embedding"],
            "text_embeddings": captions["embedding"],
            "ids": pairs.first_pairs[shards] + rows,
            "image_ids": captions["image"],
            "digest": pair_digest(images["pixel_hash"].astype(np.int64), captions["token_hash"].astype(np.int64)),
        }

    def prefetch(self, now: Sequence[int], later: Sequence[int] = (), before: Sequence[int] = ()) -> None:
        """Fetch the files of shards into the node's cache in the background (see `pipelines.stream.RemoteSource`)."""
        kinds = [self.embeddings.images, self.embeddings.captions]
        feature_files.prefetch(kinds, self.cache_bytes, now, later, before)

    def name(self, shard: int, row: int) -> str:
        """Return the key, the archive and the id of a pair, for messages."""
        return name_pair(self.embeddings.pairs, read_index(self.embeddings.pairs, shard), shard, row)

    def locate(self, ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (shards, rows), each (n,), of the pairs with these ids; see `PairSource.locate`."""
        return locate_pairs(self.embeddings.pairs, ids)
