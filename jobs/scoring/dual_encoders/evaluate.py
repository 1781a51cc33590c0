"""Running an evaluation: workers encode the units that are not in the store, then figures are computed from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from jobs.engine.cluster import start_ray
from jobs.engine.fields import named_values
from jobs.engine.tracking import resolve_uri
from jobs.scoring.dual_encoders.config import EvaluateClipConfig
from jobs.scoring.dual_encoders.encoder import (
    DualEncoderSpec,
    Embeddings,
    ImageSet,
    caption_encoder,
    embedding_store,
    encode_missing,
    encoding_units,
    read_embeddings,
)
from jobs.scoring.dual_encoders.zero_shot import ClassFolders, prompts, read_class_names, read_templates
from jobs.scoring.models import model_labels
from jobs.scoring.results import Column, Results, percent_table, publish_evaluation
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, check_source, prepare_images
from pipelines.problems import check_problems
from tempnet.contrastive.retrieval import accuracy, class_embeddings, recall

_TITLES = {
    "text_recall": "image → text R@",
    "image_recall": "text → image R@",
    "top": "top-",
    "mean_recall": "mean recall",
    "num_images": "images",
    "num_texts": "texts",
    "num_classes": "classes",
    "num_unreadable": "unreadable",
    "share_cut": "texts cut to the model's tokens",
}
clip_table = partial(percent_table, titles=_TITLES, hidden_if_zero=("share_cut",))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Images and texts to encode."""

    name: str
    images: ImageSet
    texts: Sequence[str]
    figures: Callable[[Embeddings, Embeddings], dict[str, float]]
    """Embeddings of the images and the texts → figures: shares from 0 to 1, and counts whose names begin with `num_`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """Counts of a data set's records and problems, in the form that :func:`check_problems` expects."""

    path: str
    num_records: int
    problems: dict[str, int]
    examples: Sequence[str]


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


def retrieval_sets(config: EvaluateClipConfig, tokenizer: PreTrainedTokenizerFast) -> Iterator[DataSet]:
    """Check all retrieval sets before Ray is started, and prepare them one after the other.

    Args:
        config: the configuration of the evaluation.
        tokenizer: any tokenizer. A source of pairs requires one, but only images are read from it.
    """
    sources = retrieval_sources(config)
    for source in sources.values():
        check_source(source)
    if sources:
        start_ray()
    for name, source in sources.items():
        manifest = prepare_images(source, config.run.prepared_directory, max_bad_share_field="max_bad_share")
        pairs = PairSource(manifest=manifest, tokenizer=tokenizer, image_size=1)
        texts, owners = pairs.captions()
        figures = partial(_retrieval_figures, torch.from_numpy(owners), manifest.problems.total())
        yield DataSet(name=name, images=ImageSet.of_pairs(pairs), texts=texts, figures=figures)


def _retrieval_figures(owners: Tensor, num_unreadable: int, image: Embeddings, text: Embeddings) -> dict[str, float]:
    """Returns the recalls; unreadable images were counted when the set was prepared."""
    figures = recall(torch.from_numpy(image.rows), torch.from_numpy(text.rows), owners)
    return {
        **figures,
        "num_images": len(image.rows),
        "num_texts": len(text.rows),
        "num_unreadable": num_unreadable,
    }


def zero_shot_set(config: EvaluateClipConfig, name: str, uri: str) -> DataSet:
    """Read a zero-shot set."""
    folders = ClassFolders.read(uri)
    templates = read_templates(config.template_set(name))
    class_names = read_class_names(named_values("class_names", config.class_names).get(name, ""), folders.folders)
    if folders.num_left_out:
        print(f"{name}: {folders.num_left_out} files that are no images by their names are left out")
    return DataSet(
        name=name,
        images=folders.images(config.max_pixels),
        texts=prompts(templates, class_names),
        figures=partial(_zero_shot_figures, folders, config.max_bad_share),
    )


def _zero_shot_figures(
    folders: ClassFolders, max_bad_share: float, image: Embeddings, text: Embeddings
) -> dict[str, float]:
    """Returns the accuracies."""
    num_unreadable = len(image.problems)
    reading = _Reading(
        path=folders.source,
        num_records=len(image.rows),
        problems={"unreadable": num_unreadable} if num_unreadable else {},
        examples=image.problems,
    )
    check_problems(folders.source, [reading], max_bad_share, field="max_bad_share", noun="image")
    classes = class_embeddings(torch.from_numpy(text.rows).unflatten(0, (len(folders.folders), -1)))
    figures = accuracy(torch.from_numpy(image.rows), classes, torch.from_numpy(folders.labels[image.numbers]))
    counts = {"num_images": len(image.rows), "num_classes": len(folders.folders), "num_unreadable": num_unreadable}
    return {**figures, **counts}


def evaluate(config: EvaluateClipConfig) -> Results:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the figures.

    Raises:
        ValueError, OSError: naming the field and the value, as far as possible before any work starts.
        TooManyProblemsError: if too large a share of the data is unreadable.
        ScoringFailedError: naming every failed unit, once all others have finished and the results are published.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    labels = model_labels(config.models)
    models = [DualEncoderSpec.read(label, path) for label, path in zip(labels, config.models, strict=True)]
    encoders = [caption_encoder(model) for model in models]
    zero_shot = [zero_shot_set(config, name, uri) for name, uri in named_values("zero_shot", config.zero_shot).items()]
    data = [*retrieval_sets(config, encoders[0].tokenizer), *zero_shot]
    units = {
        (model.label, one.name): encoding_units(model, config.precision, one.name, one.images, one.texts)
        for model in models
        for one in data
    }
    all_units = [unit for images, texts in units.values() for unit in (*images, *texts)]
    store = embedding_store(config.run.directory)
    failed = encode_missing(
        all_units,
        {one.name: one.images for one in data},
        store,
        config.workers,
        precision=config.precision,
        batch_size=config.batch_size,
    )
    finished = store.names()
    columns = [Column.of_model(model) for model in models]
    for column, encoder in zip(columns, encoders, strict=True):
        for one in data:
            images, texts = units[column.title, one.name]
            if finished >= {unit.file for unit in (*images, *texts)}:
                figures = one.figures(read_embeddings(store, images), read_embeddings(store, texts))
                figures["share_cut"] = float(np.mean(encoder.are_cut(one.texts)))
                column.metrics.update({f"{one.name}/{name}": value for name, value in figures.items()})
    return publish_evaluation(
        config, columns=columns, render=clip_table, uri=uri, identity=[unit.key for unit in all_units], failed=failed
    )
