"""Running an evaluation: Ray workers encode the units that are not in the store, then figures are computed from it."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.engine.cluster import check_resources, start_ray
from jobs.engine.named_values import named_values
from jobs.engine.tracking import resolved_uri
from jobs.scoring.dual_encoders.config import EvaluateClipConfig
from jobs.scoring.dual_encoders.data import DataSet, Retrieval, ZeroShot
from jobs.scoring.dual_encoders.encoder import caption_encoder
from jobs.scoring.dual_encoders.encoding import READ_CPUS, encode
from jobs.scoring.dual_encoders.table import Column, markdown
from jobs.scoring.dual_encoders.units import Embeddings, EmbeddingStore, ModelSpec, Unit, image_units, text_units
from jobs.scoring.labels import model_labels
from jobs.scoring.publishing import PublishedColumn, publish


def evaluate(config: EvaluateClipConfig) -> list[Column]:
    """Run or continue an evaluation, write `results.md` and `results.json`, and return the columns of the table.

    Raises:
        ValueError, OSError: naming the field and the value, as far as possible before any work starts.
        TooManyProblemsError: if too large a share of the data is unreadable.
        EvaluationFailedError: if a worker failed.
    """
    _ = resolved_uri(config.tracking, config.run.resolved_storage)
    models = [ModelSpec.read(*one) for one in zip(model_labels(config.models), config.models, strict=True)]
    encoders = [caption_encoder(model) for model in models]
    zero_shot = [ZeroShot.read(config, name, uri) for name, uri in named_values("zero_shot", config.zero_shot).items()]
    for folders in zero_shot:
        if number := folders.images.folders.num_left_out:
            print(f"{folders.name}: {number} files that are no images by their names are left out")
    data: list[DataSet] = [*Retrieval.prepare_all(config, encoders[0].tokenizer), *zero_shot]
    units = [_units(config, model, one) for model in models for one in data]
    store = EmbeddingStore(config.run.directory)
    _encode_missing(config, [unit for image, text in units for unit in (*image, *text)], data, store)
    columns = []
    for number, model in enumerate(models):
        metrics: dict[str, float] = {}
        for one, (image, text) in zip(data, units[number * len(data) :], strict=False):
            figures = one.figures(_embeddings(store, image), _embeddings(store, text))
            figures["share_cut"] = float(encoders[number].are_cut(one.texts).mean())
            metrics |= {f"{one.name}/{name}": value for name, value in figures.items()}
        columns.append(Column(model=model, metrics=metrics))
    publish(
        config,
        run=config.run,
        tracking=config.tracking,
        table=markdown(columns),
        columns=[
            PublishedColumn(title=column.model.label, parameters={"model": column.model.path}, metrics=column.metrics)
            for column in columns
        ],
        identity=[unit.key for image, text in units for unit in (*image, *text)],
    )
    return columns


def _units(config: EvaluateClipConfig, model: ModelSpec, data: DataSet) -> tuple[list[Unit], list[Unit]]:
    images = data.images
    return (
        image_units(model, config.precision, data.name, images.digest, images.num_images),
        text_units(model, config.precision, data.name, data.texts),
    )


def _encode_missing(
    config: EvaluateClipConfig, units: Sequence[Unit], data: Sequence[DataSet], store: EmbeddingStore
) -> None:
    wanted = {unit.key: unit for unit in units}  # two data sets may have the same texts
    left = [unit for unit in wanted.values() if not store.has(unit)]
    print(f"{len(wanted)} units, {len(wanted) - len(left)} of them encoded before; {config.run.directory}")
    if left:
        start_ray()
        check_resources(
            num_workers=config.workers.num_workers,
            cpus_per_worker=config.workers.cpus_per_worker,
            use_gpu=config.workers.use_gpu,
            data_cpus=READ_CPUS,
        )
        encode(config, left, {one.name: one.images for one in data}, store)


def _embeddings(store: EmbeddingStore, units: Sequence[Unit]) -> Embeddings:
    return Embeddings.join([store.read(unit) for unit in units])
