"""Running an evaluation: workers encode the units that are not in the store, then figures are computed from it."""

from __future__ import annotations

from functools import partial

from jobs.engine.named_values import named_values
from jobs.engine.tracking import resolve_uri
from jobs.scoring.dual_encoders.config import EvaluateClipConfig
from jobs.scoring.dual_encoders.data import DataSet, Retrieval, ZeroShot
from jobs.scoring.dual_encoders.embeddings import (
    EncodingUnit,
    embedding_store,
    encode_missing,
    image_units,
    read_embeddings,
    text_units,
)
from jobs.scoring.dual_encoders.encoder import DualEncoderSpec, caption_encoder
from jobs.scoring.models import model_labels
from jobs.scoring.results import Column, Results, percent_table, publish_evaluation

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


def evaluate(config: EvaluateClipConfig) -> Results:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the figures.

    Raises:
        ValueError, OSError: naming the field and the value, as far as possible before any work starts.
        TooManyProblemsError: if too large a share of the data is unreadable.
        ScoringFailedError: naming every failed unit, once all others have finished and the results are published.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    models = [
        DualEncoderSpec.read(label, path)
        for label, path in zip(model_labels(config.models), config.models, strict=True)
    ]
    encoders = [caption_encoder(model) for model in models]
    zero_shot = [ZeroShot.read(config, name, uri) for name, uri in named_values("zero_shot", config.zero_shot).items()]
    for folders in zero_shot:
        if number := folders.images.folders.num_left_out:
            print(f"{folders.name}: {number} files that are no images by their names are left out")
    data: list[DataSet] = [*Retrieval.prepare_all(config, encoders[0].tokenizer), *zero_shot]
    units = {(model.label, data_set.name): _units(config, model, data_set) for model in models for data_set in data}
    all_units = [unit for images, texts in units.values() for unit in (*images, *texts)]
    store = embedding_store(config.run.directory)
    failed = encode_missing(
        all_units,
        {data_set.name: data_set.images for data_set in data},
        store,
        config.workers,
        precision=config.precision,
        batch_size=config.batch_size,
    )
    finished = store.names()
    columns = [Column.of_model(model) for model in models]
    for column, encoder in zip(columns, encoders, strict=True):
        for data_set in data:
            images, texts = units[column.title, data_set.name]
            if finished >= {unit.file for unit in (*images, *texts)}:
                figures = data_set.figures(read_embeddings(store, images), read_embeddings(store, texts))
                figures["share_cut"] = float(encoder.are_cut(data_set.texts).mean())
                column.metrics.update({f"{data_set.name}/{name}": value for name, value in figures.items()})
    return publish_evaluation(
        config, columns=columns, render=clip_table, uri=uri, identity=[unit.key for unit in all_units], failed=failed
    )


def _units(
    config: EvaluateClipConfig, model: DualEncoderSpec, data: DataSet
) -> tuple[list[EncodingUnit], list[EncodingUnit]]:
    images = data.images
    return (
        image_units(model, config.precision, data.name, images.digest, images.num_images),
        text_units(model, config.precision, data.name, data.texts),
    )
