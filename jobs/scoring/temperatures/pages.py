"""HTML pages about temperatures: texts whose tokens are coloured by τ, and the pairs with the lowest and highest τ.

The page of pairs also shows τ beside a number of each image, such as the frequency of its concept.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from jobs.engine.baselines import is_constant
from jobs.scoring.results import picture
from jobs.scoring.temperatures.pairs import PairPredictionSettings
from jobs.tasks.base import naming_field
from jobs.tasks.language_model.report import ColouredText, coloured_page
from pipelines.images.archives import list_image_archives
from pipelines.images.manifest import read_index
from pipelines.images.pairs import PairSource, find_shards
from pipelines.images.temperature_table import read_numbers, read_table
from pipelines.storage import exists, write_bytes
from tempnet.intervals import Interval, spearman_interval

_NUM_SHOWN = 12
_NUM_BINS = 12
_EXPLANATION = """A temperature says how hard the loss of a sample pushes away the contrasts that are closest to it. At
the optimum of the robust loss the weights of the contrasts diverge equally from uniform ones for every sample. Where ρ is
small, samples with many close contrasts, such as those of frequent concepts, get a high τ; where ρ is large, they get the
lowest, because no τ can make so many equal contrasts differ (docs/method.md)."""

MODALITIES = {"tau_image": "images", "tau_text": "captions"}
"""Column of a table of temperatures → what it is the temperature of."""

Samples = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Images and captions → τ (n,) and the label (n,) of those that have the label."""


def labelled_temperatures(table: pa.Table, source: str, label: str) -> Samples:
    """Return τ and the label, a number in the JSON files beside the images in `source`, of the rows of a table."""
    numbers = match_numbers(table["key"].to_pylist(), source, label)
    samples = {}
    for name, noun in MODALITIES.items():
        rows = distinct_rows(name, table)
        rows = rows[~np.isnan(numbers[rows])]
        samples[noun] = (table[name].to_numpy()[rows].astype(np.float64), numbers[rows])
    return samples


def correlate(samples: Samples, label: str) -> dict[str, Interval]:
    """Return Spearman's rank correlation of τ with the label, for images and for captions."""
    with naming_field(f"label = {label}: "):
        return {noun: spearman_interval(*map(torch.from_numpy, values)) for noun, values in samples.items()}


def distinct_rows(name: str, table: pa.Table) -> np.ndarray:
    """Return the rows of the table that count for a modality: an image counts once, however many captions it has."""
    first = np.unique(table["key"].to_numpy(), return_index=True)[1]
    return first if name == "tau_image" else np.arange(table.num_rows)


def match_numbers(keys: Sequence[str], source: str, label: str) -> np.ndarray:
    """Return the label (n,) of every pair, NaN where it has none; of samples with the same key the first one counts."""
    numbers: dict[str, float] = {}
    for key, number in read_numbers(source, list_image_archives(source), label):
        numbers.setdefault(key, number)
    return np.array([numbers.get(key, np.nan) for key in keys])


def write_page(path: str, text: str, sections: dict[str, ColouredText]) -> None:
    """Write the page of a text, whose name is in the title, to a path or URI."""
    write_bytes(path, coloured_page(title=f"Temperatures of {text}", sections=sections).encode())


def check_page(path: str) -> None:
    """Check that the page can be written (OSError), before any work starts, by making an empty one unless there is one."""
    if "://" not in path:
        with Path(path).open("a", encoding="utf-8"):
            pass
    elif not exists(path):
        write_bytes(path, b"")


def write_pair_page(
    path: str, images: str, output: str, settings: PairPredictionSettings, label: str = ""
) -> Mapping[str, Interval]:
    """Write the page of a finished table in `output` to a path or URI; `images` is their name, for the title.

    Returns:
        Spearman's correlation of τ with the label, for images and for captions; empty without a label.
    """
    table = read_table(output, ["id", "key", "caption", *MODALITIES])
    source = settings.prepare(output)
    sections = []
    correlations: dict[str, Interval] = {}
    if label:
        samples = labelled_temperatures(table, settings.images.source, label)
        correlations = correlate(samples, label)
        sections.append(_label_section(label, samples, correlations))
    sections += [_example_section(name, table, source) for name in MODALITIES]
    write_bytes(path, _page(f"Temperatures of {images}", sections).encode())
    return correlations


def _label_section(label: str, samples: Samples, correlations: Mapping[str, Interval]) -> str:
    """Return the section that compares τ with a label."""
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
    shown = "; ".join(
        f"{r:+.3f} ± {half:.3f} over {len(samples[noun][0]):,} {noun}" for noun, (r, half) in correlations.items()
    )
    return (
        f"<h2>τ and {html.escape(label)}</h2>\n<p>Spearman's rank correlation, with its 95 % interval: {shown}.</p>\n"
        f"<img src='{_data_uri(stream.getvalue(), 'png')}' alt='τ over {html.escape(label)}'>"
    )


def _example_section(name: str, table: pa.Table, source: PairSource) -> str:
    """Return the pairs with the lowest and the highest τ of one modality; an image counts once."""
    tau = table[name].to_numpy()
    rows = distinct_rows(name, table)
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
    """Return the images of pairs as data URIs."""
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
        uris.append(_data_uri(stream.getvalue(), "jpeg"))
    return uris


def _data_uri(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _page(title: str, sections: Sequence[str]) -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 16px/1.6 Georgia, serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #111; background: #fff; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; }} h3 {{ font-size: 1rem; }}
.row {{ display: flex; flex-wrap: wrap; gap: 12px; }} figure {{ margin: 0; width: 144px; }}
figure img {{ width: 144px; height: 144px; }} figcaption {{ font-size: 13px; line-height: 1.3; overflow-wrap: anywhere; }}
</style></head><body>
<h1>{html.escape(title)}</h1>
<p>{_EXPLANATION}</p>
{"".join(sections)}
</body></html>
"""
