"""Runs the frozen towers of a dual encoder over the pairs of a run, once, and stores their embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from jobs.engine.cluster import start_ray
from jobs.scoring.config import PoolSection
from jobs.scoring.features.job import FeatureJob, FeatureUnit, pool_options
from jobs.scoring.units import Finished, Work
from jobs.tasks.base import resolve_paths
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.data import pair_source, prepare_split
from jobs.tasks.dual_encoder.features import caption_noise, embeddings_of, refer_to_towers
from jobs.tasks.dual_encoder.models import build_encoder
from pipelines.features import PairEmbeddings
from pipelines.images.pairs import PairSource, pixel_hash, token_hash
from pipelines.stream import Batch
from pipelines.text.tokenization import load_tokenizer


@dataclass(frozen=True, slots=True)
class Item:
    """A unit with what the towers read."""

    unit: FeatureUnit
    arrays: Batch


def units_of(embeddings: PairEmbeddings) -> list[FeatureUnit]:
    """Return all files: those of the images, and those of the captions."""
    return [*FeatureUnit.of(embeddings.images), *FeatureUnit.of(embeddings.captions)]


def read_unit(source: PairSource, unit: FeatureUnit) -> Iterator[Item]:
    """Yield the only item of a unit: the central views of its images, or the tokens of its captions."""
    files, part = unit.place
    rows = np.arange(part.start, part.stop)
    if files.name == "images":
        yield Item(unit, {"images": source.read_images(source.manifest.first_images[part.shard] + rows)})
        return
    captions = source.read_captions(np.full_like(rows, part.shard), rows)
    yield Item(unit, {name: captions[name] for name in ("input_ids", "attention_mask", "image_ids")})


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
        arrays = item.arrays
        if "images" in arrays:
            rows = [self._encoder.encode_images(part).cpu() for (part,) in self._batches(arrays["images"])]
            hashes = np.array([pixel_hash(image) for image in arrays["images"]], np.uint32)
            stored = {"embedding": torch.cat(rows).numpy(), "pixel_hash": hashes}
        else:
            texts = self._batches(arrays["input_ids"], arrays["attention_mask"])
            stored = {
                "embedding": torch.cat([self._encoder.encode_texts(*part).cpu() for part in texts]).numpy(),
                "image": arrays["image_ids"],
                "token_hash": np.array([token_hash(ids) for ids in arrays["input_ids"]], np.uint16),
            }
        files, part = item.unit.place
        return Finished(files={part.file: files.encode(part, stored)}, num_cases=part.stop - part.start)

    def _batches(self, *arrays: np.ndarray) -> Iterator[tuple[torch.Tensor, ...]]:
        for at in range(0, len(arrays[0]), self._size):
            yield tuple(torch.from_numpy(array[at : at + self._size]).to(self._device) for array in arrays)


def prepare_embeddings(config: ClipConfig) -> list[PairEmbeddings]:
    """Store the embeddings of the training and the validation pairs of a run, and return both.

    Raises:
        ValueError: if the towers are not frozen, or the cluster is too small.
        OSError, ScoringFailedError: see :meth:`jobs.scoring.features.job.FeatureJob.run`.
    """
    if not config.model.freeze:
        raise ValueError("model.freeze must be True: the embeddings of towers that are trained change with every step")
    config = resolve_paths(config)
    start_ray()
    towers = refer_to_towers(config)
    found: dict[str, PairEmbeddings] = {}  # The same pairs may be given twice.
    for split in ("train", "validation"):
        pairs = prepare_split(config, split)
        embeddings = embeddings_of(config, pairs, towers, split)
        if embeddings.directory in found:
            continue
        found[embeddings.directory] = embeddings
        source = replace(pair_source(config, pairs), caption_noise=caption_noise(config, split))
        job = FeatureJob(
            features=embeddings,
            units=units_of(embeddings),
            work=Work(
                model=partial(Towers, config),
                read=partial(read_unit, source),
                title=lambda unit: unit.file,
                noun="images or captions",
            ),
            save=partial(embeddings.save, towers.digest),
        )
        job.run(PoolSection(**pool_options(config.workers)))
    return list(found.values())
