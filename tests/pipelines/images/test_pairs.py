"""Prepared pairs: which there are, what is read of them, on what it depends, and the temperatures that belong to them."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import image_archive_support
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_archive_support import prepare
from s3_support import ObjectStore
from text_archive_support import tar

from pipelines.images.manifest import ImageManifest, read_index
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, prepare_images
from pipelines.images.temperature_table import read_temperatures, table_schema
from pipelines.images.views import AugmentationConfig, evaluation_view
from pipelines.plan import StreamPlan
from pipelines.stream import RankStream
from pipelines.text.tokenization import train_bpe

jpeg = partial(image_archive_support.jpeg, size=(40, 30))
TOKENIZER = train_bpe(["caption of number one two three four five six"] * 10, 280)


def write_tar(path: Path, samples: list[tuple[str, bytes, list[str]]]) -> None:
    """Write samples, each a key, an image and its captions."""
    members = [
        member
        for key, image, captions in samples
        for member in ((f"{key}.jpg", image), (f"{key}.json", json.dumps({"caption": captions}).encode()))
    ]
    path.write_bytes(tar(members))


def write_data(root: Path) -> Path:
    """Write three tars: 6 images with 2 captions each, no images, and 5 images with one caption, two of them bad."""
    (root / "data").mkdir()
    texts = ["one two three", "four five six"]
    write_tar(root / "data" / "0.tar", [(f"a{n}", jpeg(n), [f"{t} {n}" for t in texts]) for n in range(6)])
    write_tar(root / "data" / "1.tar", [])
    more = [(f"b{n}", jpeg(10 + n, size=(64, 80)), [f"number {n}"]) for n in range(3)]
    write_tar(root / "data" / "2.tar", [("bad", b"no image", ["x"]), *more, ("b1", jpeg(3), ["again"])])
    return root / "data"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> ImageManifest:
    root = tmp_path_factory.mktemp("pairs")
    return prepare(write_data(root), root / "prepared")


def source(manifest: ImageManifest, **options: object) -> PairSource:
    return PairSource(**{"manifest": manifest, "tokenizer": TOKENIZER, "image_size": 16, **options})


def everything(pairs: PairSource, epoch: int = 0) -> dict[str, np.ndarray]:
    return pairs.read(*pairs.locate(np.arange(pairs.manifest.num_pairs)), epoch)


def test_pairs_and_images_are_numbered_densely_and_bad_ones_counted(manifest: ImageManifest) -> None:
    assert manifest.shard_sizes == (12, 0, 3)
    assert (manifest.num_pairs, manifest.num_images) == (15, 9)
    assert manifest.problems == {"empty_archive": 1, "corrupt_image": 1, "duplicated_key": 1}
    assert manifest.shards[2].examples[0].startswith("2.tar/bad.jpg (corrupt_image")
    assert manifest.shards[2].examples[1].startswith("2.tar/b1.jpg (duplicated_key")
    images = np.concatenate([read_index(manifest, number).column("image").to_numpy() for number in range(3)])
    assert images.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8]
    texts, numbers = source(manifest).captions()
    assert [*texts[:2], texts[-1]] == ["one two three 0", "four five six 0", "number 2"]
    assert numbers.tolist() == images.tolist()


def test_the_share_of_captions_that_are_cut_is_that_of_all_or_of_a_spread_sample(manifest: ImageManifest) -> None:
    lengths = [len(row) for row in TOKENIZER(source(manifest).captions()[0])["input_ids"]]
    limit = sorted(lengths)[7]
    share = source(manifest, num_text_tokens=limit).share_of_captions_cut()
    assert share == pytest.approx(sum(length > limit for length in lengths) / len(lengths))
    # Of 4 captions from shards 0 and 2, two come from each.
    few = [*lengths[:2], *lengths[12:14]]
    shortest = source(manifest, num_text_tokens=min(few))
    assert shortest.share_of_captions_cut(max_captions=4, max_shards=2) == sum(n > min(few) for n in few) / 4


def test_digests_speak_of_content_and_order_only(manifest: ImageManifest, tmp_path: Path) -> None:
    data = write_data(tmp_path)
    assert prepare(data, tmp_path / "again").digest == manifest.digest
    write_tar(data / "1.tar", [("late", jpeg(50), ["new"])])
    assert prepare(data, tmp_path / "more").digest != manifest.digest
    digests = set()
    for number, (key, seed, caption) in enumerate([("k", 1, "c"), ("l", 1, "c"), ("k", 2, "c"), ("k", 1, "d")]):
        write_tar(tmp_path / f"{number}.tar", [(key, jpeg(seed), [caption])])
        digests.add(prepare(tmp_path / f"{number}.tar", tmp_path / f"of{number}").digest)
    assert len(digests) == 4


def test_several_views_begin_with_the_only_one_and_need_no_tokenizer(manifest: ImageManifest) -> None:
    one, two = everything(source(manifest), epoch=3), everything(source(manifest, num_views=2, tokenizer=None), epoch=3)
    assert two.keys() == {"images", "ids", "image_ids", "digest"}
    assert two["images"].shape == (15, 2, 16, 16, 3)
    assert np.array_equal(two["images"][:, 0], one["images"])
    assert all((views[0] != views[1]).any() for views in two["images"])
    again = everything(source(manifest, num_views=2, tokenizer=None), epoch=3)
    assert np.array_equal(two["images"], again["images"])
    assert len({*two["digest"], *everything(source(manifest, num_views=2, tokenizer=None))["digest"]}) == 30


def test_a_batch_holds_what_the_contract_says(manifest: ImageManifest) -> None:
    batch = everything(source(manifest))
    shapes = {"images": (15, 16, 16, 3), "input_ids": (15, 30), "attention_mask": (15, 30)}
    assert {name: value.shape for name, value in batch.items() if value.ndim > 1} == shapes
    assert batch["ids"].tolist() == list(range(15))
    assert batch["image_ids"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8]
    assert not batch["is_noisy"].any()
    assert TOKENIZER.decode(batch["input_ids"][14][batch["attention_mask"][14] == 1]) == "number 2"
    assert len(set(batch["digest"].tolist())) == 15
    assert 0 <= batch["digest"].min() <= batch["digest"].max() < 2**48


def test_what_is_read_is_a_function_of_seed_epoch_and_pair(manifest: ImageManifest) -> None:
    options = {"augmentation": AugmentationConfig(num_operations=2), "caption_noise": 0.5, "seed": 5}
    pairs = source(manifest, **options)
    whole = everything(pairs, epoch=3)
    order = np.random.default_rng(0).permutation(15)
    shuffled = pairs.read(*pairs.locate(order), 3)
    copy = pickle.loads(pickle.dumps(pairs))  # noqa: S301 — our own bytes; Ray sends it so
    one = [copy.read(*copy.locate([number]), 3) for number in order]
    for name, value in whole.items():
        assert np.array_equal(value[order], shuffled[name])
        assert np.array_equal(np.concatenate([batch[name] for batch in one]), shuffled[name])

    next_epoch, other_seed = everything(pairs, epoch=4), everything(source(manifest, **options | {"seed": 6}), epoch=3)
    for other in (next_epoch, other_seed):
        assert all(not np.array_equal(a, b) for a, b in zip(whole["images"], other["images"], strict=True))
        assert not (whole["digest"] == other["digest"]).any()
    # Noise stays as it is from epoch to epoch.
    for name in ("input_ids", "attention_mask", "is_noisy"):
        assert np.array_equal(whole[name], next_epoch[name])
    assert 0 < whole["is_noisy"].sum() < 15
    assert not np.array_equal(whole["is_noisy"], other_seed["is_noisy"])
    quiet = everything(source(manifest, **options | {"caption_noise": 0.0}), epoch=3)
    assert np.array_equal((whole["input_ids"] != quiet["input_ids"]).any(axis=1), whole["is_noisy"])
    assert np.array_equal(whole["images"], quiet["images"])
    # A stream reads its items as those of their own epoch.
    plan = StreamPlan(shard_sizes=manifest.shard_sizes, seed=1)
    stream = RankStream(source=pairs, plan=plan, batch_size=5, rank=0, world_size=1)
    for batch in stream.batches(3 * 15, 4 * 15):
        assert np.array_equal(batch["digest"], whole["digest"][batch["ids"]])


def test_images_are_read_by_number_in_any_order_and_numbers_beyond_are_refused(manifest: ImageManifest) -> None:
    numbers = [8, 0, 3, 3, 6]
    stored = [jpeg(12, size=(64, 80)), jpeg(0), jpeg(3), jpeg(3), jpeg(10, size=(64, 80))]
    views = source(manifest).read_images(numbers)
    assert np.array_equal(views, np.stack([evaluation_view(image, 16) for image in stored]))
    assert source(manifest).read_images([]).shape == (0, 16, 16, 3)
    with pytest.raises(IndexError, match=r"image 9 does not exist: the data set has images 0 … 8"):
        source(manifest).read_images([0, 9])
    for pair in (15, -1):
        with pytest.raises(IndexError, match=rf"pair {pair} does not exist: the data set has pairs 0 … 14"):
            source(manifest).locate([pair])
    assert source(manifest).name(2, 1) == f"'b1' of {manifest.source}/2.tar (pair 13)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data[:3000],
            r"0\.tar has changed since it was prepared: 'a1\.jpg' is no longer \d+ bytes at byte \d+",
        ),
        (lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:], r"0\.tar has changed since .*: 'a0\.jpg'"),
        (None, r"0\.tar"),
    ],
    ids=["cut", "other bytes", "gone"],
)
def test_an_archive_that_has_changed_is_named(
    tmp_path: Path, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    manifest = prepare(write_data(tmp_path), tmp_path / "prepared")
    path = tmp_path / "data" / "0.tar"
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(OSError, match=message):
        everything(source(manifest))


def test_pairs_in_an_object_store_are_those_of_local_files_and_a_tar_that_is_gone_is_named(
    manifest: ImageManifest, s3_server: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    s3_server.upload(write_data(tmp_path), f"{bucket}/data")
    config = PrepareImagesConfig(source=f"s3://{bucket}/data", max_bad_share=0.5)
    remote = prepare_images(config, str(tmp_path / "remote"))
    assert remote.digest == manifest.digest
    expected, found = everything(source(manifest)), everything(source(remote, cache_bytes=2**30))
    assert all(np.array_equal(found[name], value) for name, value in expected.items())
    s3_server.filesystem.delete_file(f"{bucket}/data/0.tar")
    with pytest.raises(FileNotFoundError, match=rf"s3://{bucket}/data/0\.tar: there is no such object"):
        everything(source(remote))


def test_a_directory_of_images_with_a_json_of_captions(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    for number in range(4):
        (tmp_path / "val" / f"{number}.jpg").write_bytes(jpeg(number) if number else b"")
    content = [{"image": f"val/{n}.jpg", "caption": [f"one {n}", f"two {n}"]} for n in (3, 0, 1, 9)]
    (tmp_path / "captions.json").write_text(json.dumps(content))
    manifest = prepare(tmp_path / "val", tmp_path / "prepared", str(tmp_path / "captions.json"))
    assert manifest.problems == {"empty_image": 1, "absent_image": 1}
    texts, numbers = source(manifest).captions()
    assert (texts, numbers.tolist()) == (["one 1", "two 1", "one 3", "two 3"], [0, 0, 1, 1])
    views = source(manifest).read_images([0, 1])
    assert np.array_equal(views, np.stack([evaluation_view(jpeg(number), 16) for number in (1, 3)]))


# ---- tables of temperatures ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ImageManifest]:
    """Prepare `train` (one caption per image) and `test` (five captions per image), whose keys are alike."""
    root = tmp_path_factory.mktemp("data")
    found = {}
    for split, num_images, num_texts in (("train", 30, 1), ("test", 12, 5)):
        path = root / f"{split}.tar"
        texts = [[f"{split} {number} {text}" for text in range(num_texts)] for number in range(num_images)]
        write_tar(path, [(f"{number:04d}", jpeg(number), captions) for number, captions in enumerate(texts)])
        found[split] = prepare(path, root / split)
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


def write_table(directory: Path, table: pa.Table, *, num_parts: int = 3) -> str:
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
    directory = write_table(tmp_path / "table", table.take(pa.array(order)))
    tau = read_temperatures(directory, manifest)
    assert (tau.shape, tau.dtype) == ((2, manifest.num_pairs), np.float32)
    np.testing.assert_array_equal(tau[0], (read_index(manifest, 0)["image"].to_numpy() / 1000).astype(np.float32))
    np.testing.assert_array_equal(tau[1], (np.arange(manifest.num_pairs) / 1000).astype(np.float32))


def test_what_is_no_table_or_lacks_pairs_is_refused(manifests: dict[str, ImageManifest], tmp_path: Path) -> None:
    rows = rows_of(manifests["test"])
    directory = write_table(tmp_path / "table", rows.slice(7))
    with pytest.raises(ValueError, match=r"lacks 7 of the 60 pairs of .*test.tar, for example '0000") as caught:
        read_temperatures(directory, manifests["test"])
    assert rows["caption"][2].as_py() in str(caught.value)
    assert rows["caption"][3].as_py() not in str(caught.value)
    for empty in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no part-\*\.parquet"):
            read_temperatures(str(empty), manifests["train"])
    text = write_table(tmp_path / "text", pa.table({"key": ["a"], "tau_mean": [0.5]}), num_parts=1)
    with pytest.raises(ValueError, match="has the columns key, tau_mean, and not caption, tau_image, tau_text"):
        read_temperatures(text, manifests["train"])
    # Every column says what it is.
    schema = pq.read_schema(Path(directory, "part-00000-00000.parquet"))
    assert all(field.metadata[b"unit"] and field.metadata[b"meaning"] for field in schema)
    assert table_schema(7).field("text_embedding").type == pa.list_(pa.float32(), 7)
