"""Stores what a frozen model computes of the data of a run, once: the job of `jobs.prepare_features`.

Of a language model these are the last hidden states and the output layer, of a dual encoder the embeddings of images and
captions. A unit of the map (`jobs.scoring.units`) is a file.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from jobs.engine.cluster import start_ray
from jobs.engine.config import WorkersSection
from jobs.scoring.config import LanguageModelPool
from jobs.scoring.units import Finished, UnitStore, map_units
from jobs.tasks import images
from jobs.tasks.base import resolve_paths
from jobs.tasks.dual_encoder import task as pair_data
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.task import build_encoder, caption_noise, embeddings_of, refer_to_towers
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.data import blocks_layout, features_of, refer_to_base
from jobs.tasks.language_model.models import build_base, read_only
from jobs.tasks.language_model.validation import to_tensors
from jobs.tasks.text import prepare_split
from pipelines.features import FeatureFiles, FeaturePart, Features, PairEmbeddings, describe_bytes
from pipelines.images.pairs import PairSource, pixel_hash, token_hash
from pipelines.object_store import is_local
from pipelines.storage import MANIFEST_FILE, create_directory, exists, resolve
from pipelines.stream import Batch
from pipelines.text.blocks import block_arrays, read_rows
from pipelines.text.tokenization import load_tokenizer
from tempnet.devices import input_device, move_base
from tempnet.models.output_head import HEAD_FILE, save_head


class FeatureUnit(NamedTuple):
    """What one item of the pool makes: a file with the features of some rows."""

    files: FeatureFiles
    part: FeaturePart
    """The rows that the file holds; none for the file of the output layer, which is no file of features."""

    @property
    def num_rows(self) -> int:
        return self.part.stop - self.part.start


Item = tuple[FeatureUnit, Batch]
"""A unit with what the model reads."""


def units_of(features: Features | PairEmbeddings) -> list[FeatureUnit]:
    """Return all files: that of the output layer, which is made first, and those of the blocks, or images and captions."""
    if isinstance(features, PairEmbeddings):
        return [FeatureUnit(files, part) for files in (features.images, features.captions) for part in files.parts()]
    head = FeaturePart(shard=0, start=0, stop=0, file=HEAD_FILE)
    return [FeatureUnit(features.blocks, part) for part in (head, *features.blocks.parts())]


def store_features(
    found: Sequence[tuple[Features | PairEmbeddings, Callable[[FeatureUnit], Iterator[Item]]]],
    digest: str,
    workers: WorkersSection,
    model: Callable[[], Callable[[Item], Finished]],
    noun: str,
    **spread: Any,
) -> list[Any]:
    """Make the missing files of features, given with what reads a unit of them, and return the distinct ones.

    The manifest is written last; its presence marks features as complete. The same data may be given twice. `spread` are
    options of the pool beside those of the workers.
    """
    pool = LanguageModelPool(
        num_workers=workers.max_workers, use_gpu=workers.use_gpu, cpus_per_worker=workers.cpus_per_worker, **spread
    )
    distinct = {features.directory: (features, read) for features, read in found}
    for directory, (features, read) in distinct.items():
        print(f"{directory}\n{features.describe_size()}", flush=True)
        if exists(f"{directory}/{MANIFEST_FILE}"):
            print("stored before", flush=True)
            continue
        store = UnitStore(directory)
        create_directory(directory)  # whose disk is looked at
        missing = store.missing(units_of(features), lambda unit: [unit.part.file])
        check_room(directory, missing)
        started = time.monotonic()
        map_units(missing, model, pool, store, read=read, title=lambda unit: unit.part.file, noun=noun).check()
        features.save(digest)
        print(f"stored in {time.monotonic() - started:.0f} s", flush=True)
    return [features for features, _ in distinct.values()]


def check_room(directory: str, missing: Sequence[FeatureUnit]) -> None:
    """Check that the disk of a directory has room for files (OSError)."""
    filesystem, path = resolve(directory)
    if not is_local(filesystem):
        return
    free = shutil.disk_usage(path).free
    needed = sum(unit.files.bytes_per_row * unit.num_rows for unit in missing)
    if needed > free:
        raise OSError(
            f"{directory} takes {describe_bytes(needed)} more, and its disk has {describe_bytes(free)} left: make room, or "
            "set run.prepared to a directory on another disk"
        )


def read_blocks(features: Features, unit: FeatureUnit) -> Iterator[Item]:
    text, part = features.text, unit.part
    blocks = {}
    if unit.num_rows:
        blocks = block_arrays(text, read_rows(text, text.shards[part.shard], range(part.start, part.stop)))
    yield unit, blocks


class HiddenStates:
    """A base model that computes the last hidden states of blocks, as training with this base would."""

    def __init__(self, config: LanguageModelConfig) -> None:
        tokenizer = load_tokenizer(config.tokenizer)
        self._size = config.micro_batch_size
        base = build_base(config, tokenizer, device_map=config.model.device_map)
        base = move_base(base, "cuda" if config.workers.use_gpu else "cpu")
        self._device = input_device(base)
        self._module = read_only(base, config, len(tokenizer))
        if self._module.head is None:
            raise ValueError(
                f"model.path = {config.model.path!r} does not compute its logits from its last hidden states by a matrix "
                "product, so the hidden states do not suffice for training: train without model.features"
            )

    @torch.inference_mode()
    def __call__(self, item: Item) -> Finished:
        """Compute the hidden states of an item, a micro-batch at a time, or the file of the output layer."""
        unit, blocks = item
        if not blocks:
            return Finished(files={HEAD_FILE: self._head()})
        parts = []
        for at in range(0, unit.num_rows, self._size):
            tensors = to_tensors({name: value[at : at + self._size] for name, value in blocks.items()}, self._device)
            hidden = self._module.contexts(tensors["input_ids"], tensors["position_ids"])
            parts.append(hidden.to(torch.bfloat16).cpu().view(torch.int16).numpy())
        arrays = {"hidden": np.concatenate(parts), "targets": blocks["targets"], "digest": blocks["digest"]}
        return Finished(files={unit.part.file: unit.files.encode(unit.part, arrays)}, num_cases=unit.num_rows)

    def _head(self) -> bytes:
        assert self._module.head is not None
        with tempfile.TemporaryDirectory(prefix="tempnet-head-") as name:
            file = Path(name) / HEAD_FILE
            save_head(self._module.base, self._module.head, self._module.vocab_size, file)
            return file.read_bytes()


def prepare_hidden_states(config: LanguageModelConfig) -> list[Features]:
    if not config.model.is_frozen:
        raise ValueError(
            "model.freeze must be True: the hidden states of a base that is trained change with every step"
        )
    config = resolve_paths(config)
    start_ray()
    base, found = refer_to_base(config), []
    for split in ("train", "validation"):
        features = features_of(config, prepare_split(config, blocks_layout(config, split), split), base)
        found.append((features, partial(read_blocks, features)))
    spread = {"device_map": config.model.device_map, "gpus_per_worker": config.model.num_gpus}
    return store_features(found, base.digest, config.workers, partial(HiddenStates, config), "blocks", **spread)


def read_pairs(source: PairSource, unit: FeatureUnit) -> Iterator[Item]:
    """Yield the only item of a unit: the central views of its images, or the tokens of its captions."""
    files, part = unit
    rows = np.arange(part.start, part.stop)
    if files.name == "images":
        yield unit, {"images": source.read_images(source.manifest.first_images[part.shard] + rows)}
        return
    captions = source.read_captions(np.full_like(rows, part.shard), rows)
    yield unit, {name: captions[name] for name in ("input_ids", "attention_mask", "image_ids")}


class Towers:
    """The frozen towers, which compute embeddings as training with them would."""

    def __init__(self, config: ClipConfig) -> None:
        self._size = config.micro_batch_size
        self._device = torch.device("cuda" if config.workers.use_gpu else "cpu")
        encoder = build_encoder(config, load_tokenizer(config.tokenizer, needs_eos=False))
        self._encoder = encoder.eval().to(self._device)

    @torch.inference_mode()
    def __call__(self, item: Item) -> Finished:
        """Compute the embeddings of a unit, a worker's share of a batch at a time."""
        unit, arrays = item
        if "images" in arrays:
            rows = self._embed(self._encoder.encode_images, arrays["images"])
            hashes = np.array([pixel_hash(image) for image in arrays["images"]], np.uint32)
            stored = {"embedding": rows, "pixel_hash": hashes}
        else:
            rows = self._embed(self._encoder.encode_texts, arrays["input_ids"], arrays["attention_mask"])
            hashes = np.array([token_hash(ids) for ids in arrays["input_ids"]], np.uint16)
            stored = {"embedding": rows, "image": arrays["image_ids"], "token_hash": hashes}
        return Finished(files={unit.part.file: unit.files.encode(unit.part, stored)}, num_cases=unit.num_rows)

    def _embed(self, encode: Callable[..., torch.Tensor], *arrays: np.ndarray) -> np.ndarray:
        chunks = zip(*(torch.from_numpy(array).split(self._size) for array in arrays), strict=True)
        return torch.cat([encode(*(part.to(self._device) for part in chunk)).cpu() for chunk in chunks]).numpy()


def prepare_embeddings(config: ClipConfig) -> list[PairEmbeddings]:
    if not config.model.freeze:
        raise ValueError("model.freeze must be True: the embeddings of towers that are trained change with every step")
    config = resolve_paths(config)
    start_ray()
    towers, found = refer_to_towers(config), []
    for split in ("train", "validation"):
        pairs = images.prepare_split(config, split)
        source = replace(pair_data.pair_source(config, pairs), caption_noise=caption_noise(config, split))
        found.append((embeddings_of(config, pairs, towers, split), partial(read_pairs, source)))
    return store_features(found, towers.digest, config.workers, partial(Towers, config), "images or captions")
