from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.images.archives import list_image_archives
from pipelines.images.assembly import assemble
from pipelines.images.decoding import MAX_PIXELS
from pipelines.images.index import index_archive, index_name
from pipelines.images.manifest import ImageManifest, read_index
from pipelines.images.temperature_table import read_table, read_temperatures, table_schema
from pipelines.sample.images import write_images


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ImageManifest]:
    """Prepare `train` (one caption per image) and `test` (five captions per image) of a few sample images."""
    root = tmp_path_factory.mktemp("data")
    write_images(
        root / "images", num_images=30, num_retrieval_images=12, num_classes=1, num_images_per_class=1, image_size=32
    )
    found = {}
    for split in ("train", "test"):
        source, directory = str(root / "images" / split), root / split
        directory.mkdir()
        entries = [
            index_archive(source, archive, None, max_pixels=MAX_PIXELS, index=f"{directory}/{index_name(number)}")
            for number, archive in enumerate(list_image_archives(source))
        ]
        found[split] = assemble(
            entries, None, directory=str(directory), source=source, captions_uri="", max_pixels=MAX_PIXELS
        )
    return found


def rows_of(manifest: ImageManifest) -> pa.Table:
    """Return a table of the pairs, with temperatures that identify the pair (texts) and its image (images)."""
    index = read_index(manifest, 0)
    ids = np.arange(manifest.num_pairs)
    return pa.table(
        {
            "id": ids,
            "key": index["key"],
            "caption": index["caption"],
            "tau_image": (index["image"].to_numpy() / 1000).astype(np.float32),
            "tau_text": (ids / 1000).astype(np.float32),
        },
        schema=table_schema(),
    )


def write(directory: Path, table: pa.Table, *, num_parts: int = 3) -> str:
    directory.mkdir()
    edges = np.linspace(0, table.num_rows, num_parts + 1).astype(int)
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        pq.write_table(table.slice(start, stop - start), directory / f"part-00000-{number:05d}.parquet")
    (directory / "_summary.json").write_text("{}")
    return str(directory)


@pytest.mark.parametrize("split", ["train", "test"])
def test_temperatures_come_in_the_order_of_the_data_set(
    split: str, manifests: dict[str, ImageManifest], tmp_path: Path
) -> None:
    """The table may be in any order and contain rows of other data."""
    manifest = manifests[split]
    other = rows_of(manifests["test" if split == "train" else "train"])
    other = other.set_column(4, "tau_text", pa.array(np.full(other.num_rows, 9.0, np.float32)))
    table = pa.concat_tables([rows_of(manifest), other])
    order = np.random.default_rng(0).permutation(table.num_rows)
    # Keys of the two splits are alike; captions tell them apart.
    directory = write(tmp_path / "table", table.take(pa.array(order)))
    tau = read_temperatures(directory, manifest)
    assert (tau.shape, tau.dtype) == ((2, manifest.num_pairs), np.float32)
    np.testing.assert_array_equal(tau[0], (read_index(manifest, 0)["image"].to_numpy() / 1000).astype(np.float32))
    np.testing.assert_array_equal(tau[1], (np.arange(manifest.num_pairs) / 1000).astype(np.float32))


def test_missing_pairs_are_counted_and_refused(manifests: dict[str, ImageManifest], tmp_path: Path) -> None:
    manifest = manifests["test"]
    table = rows_of(manifest)
    directory = write(tmp_path / "table", table.slice(7))
    with pytest.raises(ValueError, match=r"lacks 7 of the 60 pairs of .*test, for example '0000") as caught:
        read_temperatures(directory, manifest)
    assert table["caption"][2].as_py() in str(caught.value)
    assert table["caption"][3].as_py() not in str(caught.value)


def test_what_is_no_table_is_refused(manifests: dict[str, ImageManifest], tmp_path: Path) -> None:
    for directory in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no part-\*\.parquet"):
            read_temperatures(str(directory), manifests["train"])
    text = write(tmp_path / "text", pa.table({"key": ["a"], "tau_mean": [0.5]}), num_parts=1)
    with pytest.raises(ValueError, match="has the columns key, tau_mean, and not caption, tau_image, tau_text"):
        read_temperatures(text, manifests["train"])


def test_every_column_says_what_it_is(manifests: dict[str, ImageManifest], tmp_path: Path) -> None:
    directory = write(tmp_path / "table", rows_of(manifests["train"]))
    assert read_table(directory, ["id"])["id"].to_pylist() == list(range(30))
    schema = pq.read_schema(Path(directory, "part-00000-00000.parquet"))
    assert all(field.metadata[b"unit"] and field.metadata[b"meaning"] for field in schema)
    assert table_schema(7).field("text_embedding").type == pa.list_(pa.float32(), 7)
