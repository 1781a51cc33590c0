"""Numbers of image–text pairs: the table of their temperatures, and a field of the JSON file of every sample.

The table is a directory of Parquet files `part-*.parquet` with one row per pair. A pair is identified by its key and
its caption, not by its id, because the id depends on what else was prepared with the pair.

Shapes: N pairs, d dimensions of an embedding.
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType

from pipelines.archives import resolve_source
from pipelines.images.archives import IMAGE_SUFFIXES, MAX_CAPTION_BYTES, ImageArchive
from pipelines.images.manifest import ImageManifest, read_index
from pipelines.object_store import open_for_reading
from pipelines.storage import relative, resolve
from pipelines.tars import tar_members

_TAU = ("tau_image", "tau_text")
_NUM_EXAMPLES = 3
_UNIT = "temperature, dimensionless"


def table_schema(embedding_size: int | None = None) -> pa.Schema:
    """Return the schema of the table; the metadata of every field states its unit and meaning.

    Args:
        embedding_size: d, to include columns for the embeddings of image and caption; None to omit them.
    """
    columns: list[tuple[str, pa.DataType, str, str]] = [
        ("id", pa.int64(), "number", "of the pair in the data set that was predicted, from 0"),
        ("key", pa.string(), "name", "of the image, in its archive or in the captions' json"),
        ("caption", pa.string(), "text", "as it was written"),
        ("tau_image", pa.float32(), _UNIT, "of the image against all texts"),
        ("tau_text", pa.float32(), _UNIT, "of the caption against all images"),
    ]
    if embedding_size is not None:
        vector = pa.list_(pa.float32(), embedding_size)
        columns += [
            ("image_embedding", vector, "unit vector", "of the image"),
            ("text_embedding", vector, "unit vector", "of the caption"),
        ]
    return pa.schema(
        [pa.field(name, kind, metadata={"unit": unit, "meaning": meaning}) for name, kind, unit, meaning in columns]
    )


def read_temperatures(directory: str, manifest: ImageManifest) -> np.ndarray:
    """Return the temperatures of all pairs, matched by key and caption: (2, N) float32, τ of images and of texts."""
    table = read_table(directory, ["key", "caption", *_TAU])
    pairs = pa.concat_tables(
        read_index(manifest, number).select(["key", "caption"]) for number in range(len(manifest.shards))
    )
    places = pc.index_in(_name_rows(pairs), value_set=_name_rows(table))
    if places.null_count:
        missing = pairs.filter(pc.is_null(places)).slice(0, _NUM_EXAMPLES).to_pylist()
        examples = ", ".join(f"{row['key']!r} ({row['caption']!r})" for row in missing)
        raise ValueError(
            f"{directory} lacks {places.null_count} of the {manifest.num_pairs} pairs of {manifest.source}, for example "
            f"{examples}: predict the temperatures of exactly this data set, to the end"
        )
    rows = places.to_numpy()
    return np.stack([table[name].to_numpy()[rows] for name in _TAU])


def read_table(directory: str, columns: list[str]) -> pa.Table:
    """Read columns of all parts of a table; FileNotFoundError if there is none, ValueError if it lacks one of them."""
    filesystem, root = resolve(directory)
    files = (
        filesystem.get_file_info(FileSelector(root)) if filesystem.get_file_info(root).type != FileType.NotFound else []
    )
    parts = sorted(file.path for file in files if file.base_name.startswith("part-"))
    if not parts:
        raise FileNotFoundError(f"{directory} holds no table of temperatures: there is no part-*.parquet in it")
    names = pq.read_schema(parts[0], filesystem=filesystem).names
    if missing := [name for name in columns if name not in names]:
        raise ValueError(
            f"{directory} is no table of temperatures of image-text pairs: it has the columns {', '.join(names)}, and not "
            f"{', '.join(missing)}"
        )
    return pa.concat_tables(pq.read_table(part, columns=columns, filesystem=filesystem) for part in parts)


def _name_rows(table: pa.Table) -> pa.Array:
    """Return (rows,) key and caption joined by a line break, which is unambiguous because no key contains one."""
    columns = (table[name].combine_chunks().cast(pa.large_string()) for name in ("key", "caption"))
    return pc.binary_join_element_wise(*columns, pa.scalar("\n", pa.large_string()))


def read_numbers(uri: str, archives: Sequence[ImageArchive], field: str) -> Iterator[tuple[str, float]]:
    """Yield key and number of every sample whose JSON file has a finite number in a field, in stored order.

    Samples without one are left out, and so is what follows the place where a tar is damaged. Of every archive but the first,
    numbers are yielded with the archive's name before the key (`pipelines.images.manifest.ImageShard.key_prefix`), and
    without it where no archive before has an image of this key.
    """
    filesystem, root = resolve_source(uri)
    is_found = False
    seen: set[str] = set()
    others: set[str] = set()
    for archive in archives:
        if archive.files:
            continue
        own: set[str] = set()  # keys of the archive's images, and of its numbers
        with open_for_reading(filesystem, archive.path) as stream, suppress(tarfile.TarError):
            for info, member in tar_members(stream):
                key, _, suffix = info.name.rpartition(".")
                if suffix.lower() in IMAGE_SUFFIXES:
                    own.add(key)
                if suffix.lower() != "json" or not info.isreg() or info.size > MAX_CAPTION_BYTES:
                    continue
                try:
                    record = json.loads(member.read(info.size))
                except (ValueError, RecursionError):
                    continue
                if not isinstance(record, dict):
                    continue
                if _is_number(value := record.get(field)):
                    is_found = True
                    own.add(key)
                    if key not in seen:
                        yield key, float(value)
                    if archive is not archives[0]:
                        yield f"{relative(archive.path, root)}/{key}", float(value)
                elif not others:
                    others = {key for key, value in record.items() if _is_number(value)}
        seen |= own
    if not is_found:
        raise ValueError(
            f"label = {field}: no .json in {uri} has a number in this field"
            + (f"; fields with numbers are {', '.join(sorted(others))}" if others else "")
        )


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
