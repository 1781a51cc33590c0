"""Running an evaluation: workers encode the units that are not in the store, then figures are computed from it.

The class of an image of a zero-shot set is the last folder of its path: `airplane` for `train/airplane/0001.jpg`. The shipped
templates are those that CLIP was published with (Radford et al. 2021): 80 for ImageNet, 18 for CIFAR.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jobs.engine.cluster import start_ray
from jobs.engine.fields import named_values
from jobs.engine.tracking import resolve_uri
from jobs.scoring.dual_encoders.config import EvaluateClipConfig
from jobs.scoring.dual_encoders.encoder import (
    DualEncoderSpec,
    caption_encoder,
    embedding_store,
    encode_missing,
    encoding_units,
    read_embeddings,
)
from jobs.scoring.results import Column, Results, percent_table, publish_evaluation
from jobs.scoring.units import model_labels
from jobs.tasks.base import naming_field
from pipelines.images.archives import FOLDER_LABEL
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, check_source, describe, prepare_images
from pipelines.lines import decode, lines_of
from pipelines.local_copy import local_copy
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


class DataSet(NamedTuple):
    name: str
    pairs: PairSource
    texts: Sequence[str]
    figures: Callable[[np.ndarray, np.ndarray], dict[str, float]]
    """Embeddings of the images and the texts → figures: shares from 0 to 1, and counts whose names begin with `num_`."""


def image_sources(config: EvaluateClipConfig) -> dict[str, PrepareImagesConfig]:
    """Returns name → how the data set is prepared; of zero-shot sets the classes take the place of captions."""
    captions, splits = named_values("captions", config.captions), named_values("splits", config.splits)
    common = {name: getattr(config, name) for name in ("max_bad_share", "max_pixels", "key_dot")}
    zero_shot = {
        name: PrepareImagesConfig(source=uri, label=FOLDER_LABEL, **common)
        for name, uri in named_values("zero_shot", config.zero_shot).items()
    }
    return zero_shot | {
        name: PrepareImagesConfig(
            source=uri, captions=captions.get(name, ""), splits=tuple(splits.get(name, "").split(",")), **common
        )
        for name, uri in named_values("retrieval", config.retrieval).items()
    }


def data_sets(config: EvaluateClipConfig) -> Iterator[DataSet]:
    """Check all data sets before Ray is started, and prepare them one after the other."""
    named = image_sources(config)
    for source in named.values():
        check_source(source)
    templates = {name: read_templates(config.template_set(name)) for name, one in named.items() if one.label}
    files = named_values("class_names", config.class_names)
    class_names = {name: read_class_names(file) for name, file in files.items()}
    start_ray()
    for name, source in named.items():
        manifest = prepare_images(source, config.run.prepared_directory, max_bad_share_field="max_bad_share")
        print(f"{name}: {describe(manifest)}")
        pairs = PairSource(manifest=manifest, image_size=1)
        texts, owners = pairs.captions()
        if not source.label:
            yield DataSet(name, pairs, texts, partial(_recalls, torch.from_numpy(owners)))
            continue
        folders, labels = np.unique(texts, return_inverse=True)
        classes = name_classes(folders.tolist(), class_names.get(name), files.get(name, ""))
        yield DataSet(name, pairs, prompts(templates[name], classes), partial(_accuracies, torch.from_numpy(labels)))


def _recalls(owners: Tensor, image: np.ndarray, text: np.ndarray) -> dict[str, float]:
    return recall(torch.from_numpy(image), torch.from_numpy(text), owners) | {"num_texts": len(text)}


def _accuracies(labels: Tensor, image: np.ndarray, text: np.ndarray) -> dict[str, float]:
    num_classes = int(labels.max()) + 1
    classes = class_embeddings(torch.from_numpy(text).unflatten(0, (num_classes, -1)))
    return accuracy(torch.from_numpy(image), classes, labels) | {"num_classes": num_classes}


def evaluate(config: EvaluateClipConfig) -> Results:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the figures."""
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    labels = model_labels(config.models)
    models = [DualEncoderSpec.read(label, path) for label, path in zip(labels, config.models, strict=True)]
    encoders = [caption_encoder(model) for model in models]
    data = list(data_sets(config))
    units = {
        (model.label, one.name): encoding_units(model, config.precision, one.name, one.pairs, one.texts)
        for model in models
        for one in data
    }
    all_units = [unit for images, texts in units.values() for unit in (*images, *texts)]
    store = embedding_store(config.run.directory)
    failed = encode_missing(all_units, {one.name: one.pairs for one in data}, store, config)
    finished = store.names()
    columns = [Column.of_model(model) for model in models]
    for column, encoder in zip(columns, encoders, strict=True):
        for one in data:
            images, texts = units[column.title, one.name]
            if finished >= {unit.file for unit in (*images, *texts)}:
                figures = one.figures(read_embeddings(store, images), read_embeddings(store, texts))
                manifest = one.pairs.manifest
                figures |= {"num_images": manifest.num_images, "num_unreadable": manifest.problems.total()}
                figures["share_cut"] = float(np.mean(encoder.are_cut(one.texts)))
                column.metrics.update({f"{one.name}/{name}": value for name, value in figures.items()})
    table = percent_table(columns, _TITLES, hidden_if_zero=("share_cut",))
    identity = [unit.key for unit in all_units]
    return publish_evaluation(config, uri=uri, columns=columns, table=table, identity=identity, failed=failed)


def read_templates(name: str) -> tuple[str, ...]:
    """Returns the templates of a shipped set, or of a file with one per line; `{}` stands for the class name."""
    lines = lines_of(_text("templates", name, ("imagenet", "cifar")))
    templates = tuple(line.strip() for line in lines if line.strip())
    if not templates:
        raise ValueError(f"templates = {name!r} holds no template")
    for template in templates:
        if "{}" not in template:
            raise ValueError(f"templates = {name!r}: {template!r} has no {{}} for the name of the class")
    return templates


def read_class_names(source: str) -> dict[str, str]:
    """Returns folder → class name, from a JSON file or from a shipped list, in which folder i is the i-th name from 0."""
    shipped = ("cifar10", "cifar100")
    text = _text("class_names", source, shipped)
    if source in shipped:
        return {str(number): name for number, name in enumerate(lines_of(text.rstrip("\n")))}
    try:
        names = json.loads(text)
    except ValueError as error:
        raise ValueError(f"class_names = {source!r} is no json: {error}") from error
    if not isinstance(names, dict):
        raise ValueError(f"class_names = {source!r} is no json object of folder → name")
    return names


def name_classes(folders: Sequence[str], names: Mapping[str, str] | None, source: str = "") -> list[str]:
    """Returns the class name of every folder; None: the folders' own names, with spaces for underscores."""
    if names is None:
        return [folder.replace("_", " ") for folder in folders]
    for folder in folders:
        if not isinstance(names.get(folder), str):
            raise ValueError(f"class_names = {source!r} has no name for the folder {folder!r}")
    return [names[folder] for folder in folders]


def prompts(templates: Sequence[str], class_names: Sequence[str]) -> list[str]:
    return [template.replace("{}", name) for name in class_names for template in templates]


def _text(field: str, source: str, shipped: Sequence[str]) -> str:
    """Returns the text of a shipped file, or of the file that the field names."""
    with naming_field(f"{field} = "):
        path = Path(__file__).parent / f"{field}_{source}.txt" if source in shipped else Path(local_copy(source))
    if not path.is_file():
        raise ValueError(f"{field} = {source!r} is neither {' nor '.join(shipped)}, nor a file")
    try:
        return decode(path.read_bytes())
    except UnicodeDecodeError as error:
        raise ValueError(f"{field} = {str(path)!r} is no UTF-8 text") from error
