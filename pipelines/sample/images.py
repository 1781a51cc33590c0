"""Write rendered scenes with captions as a data set of image–text pairs: training, retrieval and zero-shot splits.

The data set consists of these files:

    train/00000.tar …           as written by img2dataset: KEY.jpg, KEY.txt (the caption) and KEY.json, 1 000 pairs
                                per tar; some keys are missing, as they are after failed downloads
    validation/, test/          the same with five captions per image: KEY.txt has the first, KEY.json all as "captions"
    zero_shot/test.tar          <class name>/0000.jpg …, where a class is one of the most frequent concepts
    zero_shot/templates.txt     prompts with {} for the class name, one per line
    concepts.json               the Zipf law and, for every concept, its rank, probability and count in each split

A pair's JSON file has the "concept", its "concept_rank" (1 is the most frequent), its "concept_frequency" (the number
of pairs in `train` with this concept, whichever split the file belongs to), its "concept_share" (that number divided
by the number of all pairs in `train`), and the whole "scene".

An image is a pure function of the seed, the split and its number, so that any number of processes writes the same
bytes.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from pipelines.sample.scenes import CONCEPTS, draw_concepts, draw_scene, generate_captions, render, zipf_probabilities
from pipelines.storage import check_empty, created_at_once

NUM_IMAGES_DEFAULT = 20_000
IMAGE_SIZE_DEFAULT = 64
ZIPF_EXPONENT = 1.0
NUM_RETRIEVAL_CAPTIONS = 5
NUM_PAIRS_PER_SHARD = 1_000
TEMPLATES = (
    "a picture of one {}",
    "a drawing of a {}",
    "an image of a single {}",
    "there is one {}",
    "this shows a large {}",
    "one {} in the middle",
    "a {}",
)

_NUM_KEYS_PER_SHARD = 10_000
_NUM_GAPS_PER_SHARD = 30
_JPEG_QUALITY = 90


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesSummary:
    """Counts of what `write_images` wrote."""

    num_images_train: int
    num_images_validation: int
    num_images_test: int
    num_images_zero_shot: int
    num_classes_zero_shot: int
    num_bytes: int


def write_images(
    directory: Path,
    *,
    num_images: int = NUM_IMAGES_DEFAULT,
    num_retrieval_images: int = 1_000,
    num_classes: int = 50,
    num_images_per_class: int = 20,
    image_size: int = IMAGE_SIZE_DEFAULT,
    seed: int = 0,
    num_processes: int | None = None,
) -> ImagesSummary:
    """Write all splits of the data set; `directory` appears only when it is complete, through a rename.

    Args:
        directory: directory to create.
        num_images: number of training pairs.
        num_retrieval_images: number of images of each retrieval split (validation and test).
        num_classes: number of zero-shot classes, which are the most frequent concepts.
        num_images_per_class: number of zero-shot images per class.
        image_size: side of the square images in pixels.
        seed: seed of all random numbers.
        num_processes: number of processes, or None for one per core; it does not affect the content of the files.
    """
    import webdataset  # noqa: F401  # With torch, once, and not in every forked process.

    check_empty(directory)
    numbers = {"train": num_images, "validation": num_retrieval_images, "test": num_retrieval_images}
    concepts = {
        split: draw_concepts(number, ZIPF_EXPONENT, random.Random(f"{seed}:{split}"))
        for split, number in numbers.items()
    }
    concepts["zero_shot"] = [concept for concept in range(num_classes) for _ in range(num_images_per_class)]
    frequencies = {split: _count_concepts(drawn) for split, drawn in concepts.items()}
    with created_at_once(directory) as staging:
        tars = []
        for split, drawn in concepts.items():
            (staging / split).mkdir()
            step = len(drawn) if split == "zero_shot" else NUM_PAIRS_PER_SHARD
            for number, first in enumerate(range(0, len(drawn), step)):
                path = staging / split / ("test.tar" if split == "zero_shot" else f"{number:05d}.tar")
                tars.append((path, split, number, first, drawn[first : first + step]))
        write = partial(_write_tar, frequencies=frequencies["train"], image_size=image_size, seed=seed)
        # Processes are forked, because a new interpreter would spend seconds on importing what the caller has imported.
        with multiprocessing.get_context("fork").Pool(num_processes or os.cpu_count()) as pool:
            pool.starmap(write, tars, chunksize=1)
            # Leaving the `with` block would terminate the processes with SIGTERM. In a job that has started Ray they
            # have inherited a handler for it, which a process that waits for a lock would never run, so the pool
            # would hang.
            pool.close()
            pool.join()
        (staging / "zero_shot" / "templates.txt").write_text("\n".join(TEMPLATES) + "\n")
        (staging / "concepts.json").write_text(json.dumps(_make_concept_table(frequencies), indent=1) + "\n")
        num_bytes = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
    return ImagesSummary(
        num_images_train=num_images,
        num_images_validation=num_retrieval_images,
        num_images_test=num_retrieval_images,
        num_images_zero_shot=len(concepts["zero_shot"]),
        num_classes_zero_shot=num_classes,
        num_bytes=num_bytes,
    )


def read_captions(directory: Path) -> Iterator[str]:
    """Yield the captions of a split in img2dataset's layout, in order; only the first of several of an image."""
    for path in sorted(directory.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.name.endswith(".txt") and (file := archive.extractfile(member)) is not None:
                    yield file.read().decode()


def _count_concepts(drawn: list[int]) -> tuple[int, ...]:
    return tuple(drawn.count(concept) for concept in range(len(CONCEPTS)))


def _make_concept_table(frequencies: dict[str, tuple[int, ...]]) -> dict[str, object]:
    probabilities = zipf_probabilities(ZIPF_EXPONENT)
    return {
        "law": "P(rank r) = r^-exponent / sum over q of q^-exponent, in train, validation and test; zero_shot is balanced",
        "exponent": ZIPF_EXPONENT,
        "concepts": [
            {
                "concept": concept.name,
                "concept_rank": index + 1,
                "probability": probabilities[index],
                "frequency": {split: counts[index] for split, counts in frequencies.items()},
            }
            for index, concept in enumerate(CONCEPTS)
        ],
    }


def _write_tar(
    path: Path,
    split: str,
    number: int,
    first: int,
    concepts: list[int],
    *,
    frequencies: tuple[int, ...],
    image_size: int,
    seed: int,
) -> None:
    """Write tar `number` of a split, with an image of each of the concepts; `first` is the number of its first image."""
    from webdataset import TarWriter

    keys = random.Random(f"{seed}:{split}:keys:{number}").sample(
        range(len(concepts) + _NUM_GAPS_PER_SHARD), len(concepts)
    )
    numbers_in_class: dict[int, int] = {}
    # Time stamps are 0, so that equal data give equal files.
    with path.open("wb") as file, TarWriter(file, encoder=False, mtime=0.0) as writer:
        for offset, (key, concept) in enumerate(zip(sorted(keys), concepts, strict=True)):
            generator = random.Random(f"{seed}:{split}:{first + offset}")
            scene = draw_scene(CONCEPTS[concept], generator)
            image = io.BytesIO()
            render(scene, image_size, generator).save(image, "JPEG", quality=_JPEG_QUALITY)
            if split == "zero_shot":
                place = numbers_in_class[concept] = numbers_in_class.get(concept, -1) + 1
                writer.write({"__key__": f"{CONCEPTS[concept].name}/{place:04d}", "jpg": image.getvalue()})
                continue
            texts = generate_captions(scene, 1 if split == "train" else NUM_RETRIEVAL_CAPTIONS, generator)
            name = f"{number * _NUM_KEYS_PER_SHARD + key:09d}"
            record = {
                "caption": texts[0],
                **({"captions": texts} if len(texts) > 1 else {}),
                "key": name,
                "status": "success",
                "error_message": None,
                "width": image_size,
                "height": image_size,
                "concept": CONCEPTS[concept].name,
                "concept_rank": concept + 1,
                "concept_frequency": frequencies[concept],
                "concept_share": frequencies[concept] / sum(frequencies),
                "scene": asdict(scene),
            }
            data = {"jpg": image.getvalue(), "txt": texts[0].encode(), "json": json.dumps(record).encode()}
            writer.write({"__key__": name, **data})
