"""The analysis `noise`: the temperatures of pairs with noisy captions beside those of the others (TempNet, Figure 8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jobs.engine.tables import markdown_table
from jobs.engine.tracking import resolve_uri
from jobs.scoring.analyses.config import Noise
from jobs.scoring.analyses.curves import show
from jobs.scoring.results import Findings, absolute_output, publish_findings
from jobs.scoring.temperatures.config import PredictPairTemperaturesConfig
from jobs.scoring.temperatures.pages import MODALITIES, match_numbers
from jobs.scoring.temperatures.pairs import PairPredictionSettings, predict_pairs, resolve_settings
from jobs.scoring.units import UnitStore
from pipelines.images.archives import list_image_archives
from pipelines.images.captions import CaptionNoise
from pipelines.images.labels import read_numbers
from pipelines.images.temperature_table import read_table
from pipelines.storage import join
from tempnet.intervals import difference_interval, mean_interval

_TITLE = "τ of pairs with noisy captions"
_CLEAN, _NOISY, _FREQUENT = "clean", "noisy", "noisy and frequent"
_MIN_PAIRS = 2
"""Number of pairs that every group needs, for an interval."""

Groups = Mapping[str, np.ndarray]
"""Name of a group → which pairs (n,) belong to it."""


def analyse_noise(config: Noise) -> dict[str, Any]:
    """Run or continue the analysis, and return its figures.

    Raises:
        FileNotFoundError, ValueError: before any work starts, if model and images do not fit together; ValueError too if a
            group has fewer than two pairs.
        ScoringFailedError: naming what failed.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    output = absolute_output(config)
    settings = _prediction_settings(config)
    source = settings.images.source
    next(read_numbers(source, list_image_archives(source), config.label))  # one sample with it is enough to begin
    temperatures = join(output, "temperatures")
    UnitStore(temperatures).claim(settings.record())
    predict_pairs(settings, temperatures, config.workers)
    table = read_table(temperatures, ["id", "key", *MODALITIES])
    numbers = match_numbers(table["key"].to_pylist(), source, config.label)
    groups = group_pairs(table["id"].to_numpy(), numbers, settings.noise)
    tau = {noun: table[name].to_numpy().astype(np.float64) for name, noun in MODALITIES.items()}
    values = figures(groups, tau)
    rows = [["group", "pairs", *(f"mean τ of {noun}" for noun in tau)]]
    rows += [
        [name, f"{int(chosen.sum())}", *(show(mean_interval(of_kind[chosen])) for of_kind in tau.values())]
        for name, chosen in groups.items()
    ]
    findings = Findings(
        title=_TITLE,
        values=values,
        table=markdown_table(rows),
        conclusion=conclude(values),
        picture="noise.png",
        plot=partial(plot, groups, tau),
        metrics={f"noisy_minus_clean_{noun}": values["differences"][noun]["mean"] for noun in tau},
        settings={"analysis": _TITLE, "label": config.label, **settings.record()},
        source=config.images,
    )
    publish_findings(config, findings, uri=uri)
    return values


def _prediction_settings(config: Noise) -> PairPredictionSettings:
    settings = resolve_settings(
        PredictPairTemperaturesConfig(
            model=config.model,
            images=config.images,
            output=config.output,
            batch_size=config.batch_size,
            workers=config.workers,
        )
    )
    return dataclasses.replace(settings, noise=CaptionNoise(share=config.share, seed=config.seed))


def group_pairs(ids: np.ndarray, numbers: np.ndarray, noise: CaptionNoise) -> Groups:
    """Return which pairs are clean, noisy, and both noisy and above the median of the label.

    Args:
        ids: ids (n,) of the pairs.
        numbers: label (n,) of the pairs, NaN where there is none.
        noise: the noise that the captions got.

    Raises:
        ValueError: if a group has fewer than two pairs.
    """
    is_noisy = np.array([noise.selects(int(pair)) for pair in ids], dtype=bool)
    is_frequent = numbers > np.nanmedian(numbers)
    groups = {_CLEAN: ~is_noisy, _NOISY: is_noisy, _FREQUENT: is_noisy & is_frequent}
    if small := [f"{name} {int(chosen.sum())}" for name, chosen in groups.items() if chosen.sum() < _MIN_PAIRS]:
        raise ValueError(f"images: every group needs {_MIN_PAIRS} pairs; of {len(ids)} pairs are {', '.join(small)}")
    return groups


def figures(groups: Groups, tau: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the mean τ of every group, and the difference between noisy and clean pairs, with 95 % half-widths.

    Args:
        groups: the groups.
        tau: images and captions → τ (n,) of every pair.
    """
    differences = {}
    for noun, of_kind in tau.items():
        differences[noun] = difference_interval(of_kind[groups[_NOISY]], of_kind[groups[_CLEAN]]).as_json()
    return {
        "groups": [
            {
                "group": name,
                "num_pairs": int(chosen.sum()),
                **{noun: mean_interval(of_kind[chosen]).as_json() for noun, of_kind in tau.items()},
            }
            for name, chosen in groups.items()
        ],
        "differences": differences,
    }


def conclude(values: Mapping[str, Any]) -> str:
    """Return one line that says whether noisy captions and their images have another τ than the others."""
    parts = []
    for noun, difference in values["differences"].items():
        mean, half = difference["mean"], difference["half_width"]
        word = "higher" if mean > half else "lower" if mean < -half else "not seen to differ"
        parts.append(f"τ of noisy pairs' {noun} is {word} ({mean:+.2g} ± {half:.1g})")
    return "; ".join(parts)


def plot(groups: Groups, tau: Mapping[str, np.ndarray], path: Path) -> None:
    """Plot the distribution of τ in every group, images above captions."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(len(tau), figsize=(7, 1 + 2.4 * len(tau)), layout="constrained")
    for axes, (noun, of_kind) in zip(rows, tau.items(), strict=True):
        edges = np.histogram_bin_edges(of_kind, bins=40)
        for name, chosen in groups.items():
            axes.hist(of_kind[chosen], bins=edges, density=True, histtype="step", label=f"{name} ({int(chosen.sum())})")
        axes.set(xlabel=f"τ of {noun}", ylabel="density")
    rows[0].legend(fontsize=8)
    figure.suptitle(_TITLE)
    figure.savefig(path, dpi=120)
    plt.close(figure)
