"""Temperatures of image–text pairs: prepared archives → parts of their pairs → a pool → tables, and a page of them.

The tables depend neither on the number of workers nor on the order in which parts are finished. Images are resized and
centre-cropped, and captions are used as they were written: nothing is random. The page shows the pairs with the lowest and
highest τ, and τ beside a number of each image, such as the frequency of its concept.

Shapes: n pairs of a part, m images of it, S pixels per side, d size of the embedding.
"""

from __future__ import annotations

import html
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from jobs.engine.export import tempnet_digest
from jobs.engine.fields import absolute_path
from jobs.engine.report import data_uri, html_page, is_constant, picture
from jobs.scoring.dual_encoders.encoder import Encoder, PairSettings, pair_options
from jobs.scoring.temperatures.config import SUMMARY_FILE, PredictPairTemperaturesConfig
from jobs.scoring.units import Finished, UnitStore, map_units, part_file, to_parquet
from jobs.tasks.base import naming_field
from pipelines.images.archives import list_image_archives
from pipelines.images.captions import CaptionNoise
from pipelines.images.manifest import read_index
from pipelines.images.pairs import PairSource, find_shards
from pipelines.images.temperature_table import read_numbers, read_table, table_schema
from pipelines.local_copy import local_copy
from pipelines.storage import write_bytes, write_json
from tempnet.intervals import Interval, spearman_interval
from tempnet.models.dual_encoder import IMAGE_TEMPNET_DIRECTORY, TEXT_TEMPNET_DIRECTORY, load_pair_tempnets
from tempnet.statistics import BOUND_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPredictionSettings(PairSettings):
    own_fields = ("precision", "part_pairs", "with_embeddings")
    tempnet: str
    tau_ranges: tuple[tuple[float, float], ...]
    """[τ₀, τ_max] at inference, for images and for texts."""
    tempnet_digests: tuple[str, ...]
    noise: CaptionNoise = field(default_factory=CaptionNoise)

    def record(self) -> dict[str, Any]:
        """Returns everything that decides the table, as a flat mapping."""
        return {
            **PairSettings.record(self),
            **dict(zip(("tempnet_image", "tempnet_text"), self.tempnet_digests, strict=True)),
            **({"caption_noise": [self.noise.share, self.noise.seed]} if self.noise.share else {}),
        }


def resolve_settings(config: PredictPairTemperaturesConfig) -> PairPredictionSettings:
    tempnet = config.tempnet or config.model
    with naming_field("tempnet = " if config.tempnet else "model = "):
        networks = load_pair_tempnets(local_copy(tempnet))
    options = pair_options(config)
    embedding_size = options["model"].embedding_size
    for name, network in zip((IMAGE_TEMPNET_DIRECTORY, TEXT_TEMPNET_DIRECTORY), networks, strict=True):
        if network.config.kind != "embeddings" or network.config.input_size != embedding_size:
            raise ValueError(
                f"{tempnet}/{name} reads {network.config.input_size} {network.config.kind}, the embeddings of "
                f"{config.model} have a size of {embedding_size}"
            )
    return PairPredictionSettings(
        **options,
        tempnet=absolute_path(tempnet),
        tau_ranges=tuple((network.config.tau_min, network.config.inference_tau_max) for network in networks),
        tempnet_digests=tuple(map(tempnet_digest, networks)),
    )


class _Part(NamedTuple):
    """Consecutive pairs of one archive: the rows start … stop − 1 of its index."""

    shard: int
    number: int
    start: int
    stop: int

    @property
    def file(self) -> str:
        return part_file(self.shard, self.number)


class _PartPredictor:
    """Makes the tables of parts, in a worker, with encoders and TempNets in evaluation mode."""

    def __init__(self, settings: PairPredictionSettings) -> None:
        config = settings.config
        options = {"precision": config.precision, "batch_size": config.batch_size, "use_gpu": config.workers.use_gpu}
        self._encoder = Encoder(settings.model, **options)
        self._tempnets = load_pair_tempnets(local_copy(settings.tempnet))
        self._with_embeddings = config.with_embeddings

    @torch.inference_mode()
    def __call__(self, read: tuple[str, pa.Table, np.ndarray]) -> Finished:
        file, pairs, images = read
        rows = self._encoder.images(images), self._encoder.texts(pairs["caption"].to_pylist())
        tau = [network(torch.from_numpy(part)).numpy() for network, part in zip(self._tempnets, rows, strict=True)]
        of_pair, size = pairs["image"].to_numpy(), rows[0].shape[1] if self._with_embeddings else None
        columns: dict[str, Any] = {name: pairs[name] for name in ("id", "key", "caption")}
        columns |= {"tau_image": tau[0][of_pair], "tau_text": tau[1]}
        if size is not None:
            for name, values in (("image_embedding", rows[0][of_pair]), ("text_embedding", rows[1])):
                columns[name] = pa.FixedSizeListArray.from_arrays(values.ravel(), size)
        table = pa.table(columns, schema=table_schema(size))
        return Finished(files={file: to_parquet(table)}, num_cases=table.num_rows)


def _read(source: PairSource, noise: CaptionNoise, part: _Part) -> Iterator[tuple[str, pa.Table, np.ndarray]]:
    """Yield the file of a part, its pairs with the position `image` among its images, and these (m, S, S, 3), uint8."""
    index = read_index(source.manifest, part.shard).slice(part.start, part.stop - part.start)
    numbers, image = np.unique(index["image"].to_numpy(), return_inverse=True)
    first = int(source.manifest.first_pairs[part.shard])
    ids = range(first + part.start, first + part.stop)
    captions = [noise.apply(text, pair)[0] for text, pair in zip(index["caption"].to_pylist(), ids, strict=True)]
    pairs = pa.table({"id": np.array(ids), "key": index["key"], "caption": captions, "image": image})
    yield part.file, pairs, source.read_images(numbers)


def predict_pairs(settings: PairPredictionSettings, output: str) -> dict[str, Any]:
    """Claim the output, write the missing parts of its table and the summary, and return the summary."""
    store, record = UnitStore(output), settings.record()
    store.claim(record)
    started = time.monotonic()
    source, size = settings.begin(output), settings.config.part_pairs
    manifest = source.manifest
    parts = [
        _Part(shard, number, start, min(start + size, num_pairs))
        for shard, num_pairs in enumerate(manifest.shard_sizes)
        for number, start in enumerate(range(0, num_pairs, size))
    ]
    outcome = map_units(
        store.missing(parts),
        partial(_PartPredictor, settings),
        settings.config.workers,
        store,
        read=partial(_read, source, settings.noise),
        title=lambda part: f"{manifest.shards[part.shard].archive.rsplit('/', 1)[-1]} part {part.number}",
        noun="pairs",
    )
    outcome.check()
    figures: dict[str, float] = {}
    table = read_table(output, list(MODALITIES))
    for name, (low, high) in zip(MODALITIES, settings.tau_ranges, strict=True):
        tau = table[name].to_numpy().astype(np.float64)
        margin = BOUND_SHARE * (high - low)
        figures |= {
            f"{name}_mean": float(tau.mean()),
            f"{name}_std": float(tau.std()),
            f"{name}_share_lower_bound": float((tau <= low + margin).mean()),
            f"{name}_share_upper_bound": float((tau >= high - margin).mean()),
        }
    summary = {
        "num_pairs": manifest.num_pairs,
        "num_images": manifest.num_images,
        "num_parts": len(parts),
        **figures,
        "problems": dict(manifest.problems),
        "data_digest": manifest.digest,
        "settings": record,
    }
    write_json(f"{output}/{SUMMARY_FILE}", summary)
    return summary | {"num_pairs_now": outcome.num_cases, "seconds_now": time.monotonic() - started}


_NUM_SHOWN = 12
_NUM_BINS = 12
_EXPLANATION = """A temperature says how hard the loss of a sample pushes away the contrasts that are closest to it. At
the optimum of the robust loss the weights of the contrasts diverge equally from uniform ones for every sample. Where ρ is
small, samples with many close contrasts, such as those of frequent concepts, get a high τ; where ρ is large, they get the
lowest, because no τ can make so many equal contrasts differ (docs/method.md)."""

MODALITIES = {"tau_image": "images", "tau_text": "captions"}
"""Column of a table of temperatures → what it is the temperature of."""

Samples = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Images and captions → τ (n,) and the label (n,) of the images that have the label."""


def labelled_temperatures(table: pa.Table, source: str, label: str) -> Samples:
    """Return τ and the label, a number in the JSON files beside the images in `source`, of the images of a table.

    Captions of one image count once, with their mean τ: they share the label, so that they are not independent samples.
    """
    keys, image = np.unique(table["key"].to_numpy(), return_inverse=True)
    numbers, sizes = match_numbers(keys.tolist(), source, label), np.bincount(image)
    known = ~np.isnan(numbers)
    taus = {noun: np.bincount(image, weights=table[name].to_numpy()) / sizes for name, noun in MODALITIES.items()}
    return {noun: (tau[known], numbers[known]) for noun, tau in taus.items()}


def correlate(samples: Samples, label: str) -> dict[str, Interval]:
    with naming_field(f"label = {label}: "):
        return {noun: spearman_interval(*map(torch.from_numpy, values)) for noun, values in samples.items()}


def numbers_of(source: str, label: str) -> Iterator[tuple[str, float]]:
    """Yield key and label of every sample that has it; ValueError if none has."""
    return read_numbers(source, list_image_archives(source), label)


def match_numbers(keys: Sequence[str], source: str, label: str) -> np.ndarray:
    """Return the label (n,) of every pair, NaN where it has none; of samples with the same key the first one counts."""
    numbers: dict[str, float] = {}
    for key, number in numbers_of(source, label):
        numbers.setdefault(key, number)
    return np.array([numbers.get(key, np.nan) for key in keys])


def write_pair_page(settings: PairPredictionSettings, output: str) -> Mapping[str, Interval]:
    """Write the page of a finished table in `output`.

    Returns Spearman's correlation of τ with the label, for images and for captions; empty without a label.
    """
    config, label = settings.config, settings.config.label
    table = read_table(output, ["id", "key", "caption", *MODALITIES])
    source = settings.prepare(output)
    sections = []
    correlations: dict[str, Interval] = {}
    if label:
        samples = labelled_temperatures(table, settings.images.source, label)
        correlations = correlate(samples, label)
        sections.append(_label_section(label, samples, correlations))
    sections += [_example_section(name, table, source) for name in MODALITIES]
    page = html_page(f"Temperatures of {config.images}", f"<p>{_EXPLANATION}</p>\n{''.join(sections)}")
    write_bytes(config.html, page.encode())
    return correlations


def _label_section(label: str, samples: Samples, correlations: Mapping[str, Interval]) -> str:
    stream = io.BytesIO()
    with picture(stream, figsize=(7, 3.8)) as ((axes,),):
        for (noun, (tau, values)), colour in zip(samples.items(), ("tab:blue", "tab:orange"), strict=True):
            edges = np.unique(np.quantile(values, np.linspace(0, 1, _NUM_BINS + 1)))
            bins = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(0, len(edges) - 2))
            chosen = [bins == number for number in np.unique(bins)]
            centres = [float(np.median(values[rows])) for rows in chosen]
            low, middle, high = np.array([np.quantile(tau[rows], [0.1, 0.5, 0.9]) for rows in chosen]).T
            axes.plot(centres, middle, marker="o", color=colour, label=f"{noun}: median, 10 % to 90 %")
            axes.fill_between(centres, low, high, color=colour, alpha=0.2)
        if values.min() > 0 and values.max() / values.min() > 30:
            axes.set_xscale("log")
        axes.set(xlabel=label, ylabel="τ")
        axes.legend()
    shown = "; ".join(f"{noun} {r:+.3f} ± {half:.3f}" for noun, (r, half) in correlations.items())
    return (
        f"<h2>τ and {html.escape(label)}</h2>\n<p>Spearman's rank correlation, with its 95 % interval over "
        f"{len(values):,} images: {shown}. Captions of one image count once, with their mean τ.</p>\n"
        f"<img src='{data_uri(stream.getvalue(), 'png')}' alt='τ over {html.escape(label)}'>"
    )


def _example_section(name: str, table: pa.Table, source: PairSource) -> str:
    """Return the pairs with the lowest and the highest τ of one modality; an image counts once."""
    tau = table[name].to_numpy()
    rows = np.arange(len(tau))
    if name == "tau_image":  # which counts once, however many captions it has
        rows = np.unique(table["key"].to_numpy(), return_index=True)[1]
    rows = rows[np.argsort(tau[rows], kind="stable")]
    count = min(_NUM_SHOWN, len(rows) // 2 or 1)
    parts = []
    for title, chosen in (("lowest", rows[:count]), ("highest", rows[::-1][:count])):
        cards = "".join(
            f"<figure><img src='{image}' alt=''><figcaption><b>τ {tau[row]:.4f}</b> "
            f"{html.escape(table['caption'][int(row)].as_py())}</figcaption></figure>"
            for row, image in zip(chosen, _thumbnails(table["id"].to_numpy()[chosen], source), strict=True)
        )
        parts.append(f"<h3>{title} τ</h3>\n<div class='row'>{cards}</div>")
    tau = tau[rows]
    low, middle, high = np.quantile(tau, [0.05, 0.5, 0.95])
    warning = ""
    if is_constant({"tau_mean": tau.mean(), "tau_std": tau.std()}):
        noun = MODALITIES[name].removesuffix("s")
        warning = (
            f"<p><b>The {noun} TempNet is constant:</b> τ spreads by {tau.std() / tau.mean():.2%} of its mean, so that the "
            "order below says nothing.</p>\n"
        )
    return (
        f"<h2>{MODALITIES[name].capitalize()}</h2>\n{warning}<p>mean τ {tau.mean():.4f}; 5 %, 50 %, 95 %: {low:.4f}, "
        f"{middle:.4f}, {high:.4f}</p>\n{''.join(parts)}"
    )


def _thumbnails(ids: np.ndarray, source: PairSource) -> list[str]:
    manifest = source.manifest
    shards = find_shards(ids, manifest.first_pairs, "pair")
    numbers = [
        read_index(manifest, int(shard))["image"][int(number - manifest.first_pairs[shard])].as_py()
        for number, shard in zip(ids, shards, strict=True)
    ]
    uris = []
    for pixels in source.read_images(numbers):
        stream = io.BytesIO()
        Image.fromarray(np.asarray(pixels)).save(stream, "JPEG", quality=85)
        uris.append(data_uri(stream.getvalue(), "jpeg"))
    return uris
