"""The data sets of an evaluation: numbered images, texts, and which of them belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from jobs.engine.cluster import start_ray
from jobs.engine.fields import absolute_path
from jobs.engine.named_values import named_values
from jobs.scoring.dual_encoders.config import EvaluateClipConfig
from jobs.scoring.dual_encoders.embeddings import Embeddings
from jobs.scoring.dual_encoders.encoder import DualEncoderSpec, caption_encoder
from jobs.scoring.dual_encoders.images import ClassFolders, FolderImages, ImageSet, PairImages
from jobs.scoring.dual_encoders.prompts import prompts, read_class_names, read_templates
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.models import model_labels
from jobs.scoring.temperatures.config import PredictPairTemperaturesConfig
from jobs.tasks.base import naming_field
from pipelines.archives import resolve_source
from pipelines.images.prepare import PrepareImagesConfig, check_source, prepare_images
from pipelines.problems import check_problems
from pipelines.storage import relative
from tempnet.contrastive.retrieval import accuracy, class_embeddings, recall


class DataSet(Protocol):
    """Images and texts to encode, and how to compute figures from their embeddings."""

    @property
    def name(self) -> str: ...

    @property
    def images(self) -> ImageSet: ...

    @property
    def texts(self) -> Sequence[str]: ...

    def figures(self, image: Embeddings, text: Embeddings) -> dict[str, float]:
        """Returns figures: shares from 0 to 1, and counts whose names begin with `num_`."""


def retrieval_sources(config: EvaluateClipConfig) -> dict[str, PrepareImagesConfig]:
    """Returns, by name, how to prepare every retrieval set."""
    captions, splits = named_values("captions", config.captions), named_values("splits", config.splits)
    return {
        name: PrepareImagesConfig(
            source=uri,
            captions=captions.get(name, ""),
            splits=tuple(splits.get(name, "").split(",")),
            max_bad_share=config.max_bad_share,
            max_pixels=config.max_pixels,
            key_dot=config.key_dot,
        )
        for name, uri in named_values("retrieval", config.retrieval).items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval:
    """A retrieval set: images and their captions."""

    name: str
    images: PairImages
    texts: Sequence[str]
    image_of_text: np.ndarray
    """(m,) number of the image that each caption belongs to."""

    @classmethod
    def prepare_all(cls, config: EvaluateClipConfig, tokenizer: PreTrainedTokenizerFast) -> list[Retrieval]:
        """Prepare the retrieval sets of a configuration.

        All of them are checked before Ray is started and the first one is prepared.

        Args:
            config: the configuration of the evaluation.
            tokenizer: any tokenizer. A source of pairs requires one, but only images are read from it.

        Raises:
            ValueError, OSError: if the images or captions are invalid or missing.
            TooManyProblemsError: if too large a share of a set is unreadable.
        """
        sources = retrieval_sources(config)
        for source in sources.values():
            check_source(source)
        if sources:
            start_ray()
        sets = []
        for name, source in sources.items():
            manifest = prepare_images(source, config.run.prepared_directory, max_bad_share_field="max_bad_share")
            images = PairImages(manifest=manifest, tokenizer=tokenizer)
            texts, image_of_text = images.source(1).captions()
            sets.append(cls(name=name, images=images, texts=texts, image_of_text=image_of_text))
        return sets

    def figures(self, image: Embeddings, text: Embeddings) -> dict[str, float]:
        """Returns the recalls; unreadable images were already counted when the set was prepared."""
        figures = recall(
            torch.from_numpy(image.rows), torch.from_numpy(text.rows), torch.from_numpy(self.image_of_text)
        )
        return {
            **figures,
            "num_images": len(image.rows),
            "num_texts": len(text.rows),
            "num_unreadable": self.images.manifest.problems.total(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroShot:
    """A zero-shot set: images in class folders, and the prompts of all classes, class after class."""

    name: str
    images: FolderImages
    texts: Sequence[str]
    max_bad_share: float

    @classmethod
    def read(cls, config: EvaluateClipConfig, name: str, uri: str) -> ZeroShot:
        """Read a zero-shot set.

        Raises:
            ValueError, OSError: if the images, the templates or the class names are invalid or missing.
        """
        folders = ClassFolders.read(uri)
        templates = read_templates(config.template_set(name))
        class_names = read_class_names(named_values("class_names", config.class_names).get(name, ""), folders.folders)
        return cls(
            name=name,
            images=FolderImages(folders=folders, max_pixels=config.max_pixels),
            texts=prompts(templates, class_names),
            max_bad_share=config.max_bad_share,
        )

    def figures(self, image: Embeddings, text: Embeddings) -> dict[str, float]:
        """Returns the accuracies.

        Raises:
            TooManyProblemsError: if too many images were unreadable.
        """
        folders = self.images.folders
        reading = _Reading(
            path=folders.source,
            num_records=len(image.rows),
            problems={"unreadable": len(image.problems)} if image.problems else {},
            examples=image.problems,
        )
        check_problems(folders.source, [reading], self.max_bad_share, field="max_bad_share", noun="image")
        prompts_of_classes = torch.from_numpy(text.rows).unflatten(0, (len(folders.folders), -1))
        figures = accuracy(
            torch.from_numpy(image.rows),
            class_embeddings(prompts_of_classes),
            torch.from_numpy(folders.labels[image.numbers]),
        )
        return {
            **figures,
            "num_images": len(image.rows),
            "num_classes": len(folders.folders),
            "num_unreadable": len(image.problems),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """Counts of a data set's records and problems, in the form that :func:`check_problems` expects."""

    path: str
    num_records: int
    problems: dict[str, int]
    examples: Sequence[str] = field(default=())


def model_record(model: DualEncoderSpec) -> dict[str, Any]:
    """Returns the digest of a dual encoder and the sizes of what it reads, without its location."""
    return {f"model.{name}": getattr(model, name) for name in ("digest", "image_size", "num_text_tokens")}


def pairs_record(images: PrepareImagesConfig) -> dict[str, Any]:
    """Returns the archives of a source of pairs and their captions, without locations and the tolerated problems.

    The contents of archives are identified by their sizes; an archive that changes while it is read is detected by
    checksums.

    Raises:
        FileNotFoundError, ValueError: if the images or captions are missing or not understood.
    """
    archives, captions = check_source(images)
    root = resolve_source(images.source)[1]
    return {
        "num_captioned_images": None if captions is None else len(captions.captions),
        "splits": list(images.splits),
        **({} if images.key_dot == "first" else {"key_dot": images.key_dot}),
        **{
            f"archive {relative(archive.path, root)} (bytes)": [archive.num_bytes, len(archive.files)]
            for archive in archives
        },
    }


def resolve_pairs(config: PredictPairTemperaturesConfig | Headroom) -> tuple[PrepareImagesConfig, DualEncoderSpec]:
    """Returns how the pairs of a configuration are prepared, and its model.

    Raises:
        FileNotFoundError, OSError: if images, captions or the model are missing.
        ValueError: naming the field, if they are not understood.
    """
    images = PrepareImagesConfig(
        source=absolute_path(config.images),
        captions=absolute_path(config.captions),
        splits=config.splits,
        max_bad_share=config.max_bad_share,
        key_dot=config.key_dot,
    )
    with naming_field("images: "):
        check_source(images)
    (label,) = model_labels([config.model])
    model = DualEncoderSpec.read(label, config.model, field="model")
    caption_encoder(model, field="model")
    return images, model
