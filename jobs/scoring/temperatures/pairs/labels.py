"""Temperatures of image-text pairs beside a number of each image, such as the frequency of its concept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch

from jobs.tasks.base import naming_field
from pipelines.images.archives import list_image_archives
from pipelines.images.labels import read_numbers
from tempnet.intervals import Interval, spearman_interval

MODALITIES = {"tau_image": "images", "tau_text": "captions"}
"""Column of a table of temperatures → what it is the temperature of."""

Samples = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Images and captions → τ (n,) and the label (n,) of those that have the label."""


def labelled_temperatures(table: pa.Table, source: str, label: str) -> Samples:
    """Return τ and the label of the images, and of the captions.

    Args:
        table: table of temperatures with the column `key` and those of `MODALITIES`.
        source: archives or directory of the images.
        label: field with a number in the JSON files beside the images.
    """
    numbers = match_numbers(table["key"].to_pylist(), source, label)
    samples = {}
    for name, noun in MODALITIES.items():
        rows = distinct_rows(name, table)
        rows = rows[~np.isnan(numbers[rows])]
        samples[noun] = (table[name].to_numpy()[rows].astype(np.float64), numbers[rows])
    return samples


def correlate(samples: Samples, label: str) -> dict[str, Interval]:
    """Return Spearman's rank correlation of τ with the label and its 95 % half-width, for images and for captions.

    Raises:
        ValueError: if fewer than 4 samples have the label.
    """
    with naming_field(f"label = {label}: "):
        return {
            noun: spearman_interval(torch.from_numpy(tau), torch.from_numpy(values))
            for noun, (tau, values) in samples.items()
        }


def distinct_rows(name: str, table: pa.Table) -> np.ndarray:
    """Return the rows of the table that count for a modality: an image counts once, however many captions it has."""
    return (
        np.unique(table["key"].to_numpy(), return_index=True)[1] if name == "tau_image" else np.arange(table.num_rows)
    )


def match_numbers(keys: Sequence[str], source: str, label: str) -> np.ndarray:
    """Return the label (n,) of every pair, NaN where it has none; of samples with the same key the first one counts."""
    numbers: dict[str, float] = {}
    for key, number in read_numbers(source, list_image_archives(source), label):
        numbers.setdefault(key, number)
    return np.array([numbers.get(key, np.nan) for key in keys])
