"""Analyses of the temperatures of image–text pairs.

phase    how the rank correlation of τ with a number beside the images depends on ρ
noise    the temperatures of pairs with noisy captions beside those of the others (TempNet, Figure 8)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyarrow.fs import FileSelector, FileType

from jobs.engine.report import markdown_table, picture
from jobs.engine.tracking import resolve_uri
from jobs.scoring.analyses.config import Noise, PairAnalysis, Phase
from jobs.scoring.analyses.curves import Points, publish_curves, show
from jobs.scoring.results import publish_findings
from jobs.scoring.temperatures.config import PredictPairTemperaturesConfig
from jobs.scoring.temperatures.pairs import (
    MODALITIES,
    PairPredictionSettings,
    correlate,
    labelled_temperatures,
    match_numbers,
    numbers_of,
    predict_pairs,
    resolve_settings,
)
from jobs.scoring.units import absolute_output
from pipelines.images.captions import CaptionNoise
from pipelines.images.temperature_table import read_table
from pipelines.storage import join, read_json, resolve
from tempnet.intervals import Interval, difference_interval, mean_interval


def _prediction_settings(config: PairAnalysis, model: str) -> PairPredictionSettings:
    """Return the settings that predict the temperatures of all pairs, of which at least one must have the label."""
    names = ("images", "output", "batch_size", "workers")
    options = {name: getattr(config, name) for name in names}
    settings = resolve_settings(PredictPairTemperaturesConfig(model=model, **options))
    next(numbers_of(settings.images.source, config.label))
    return settings


def analyse_phase(config: Phase) -> Points:
    """Run or continue the analysis: every trial of the sweep predicts the temperatures of all pairs.

    Shown are means over trials of the same ρ with intervals over trials; of a single trial, the interval over samples.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    trials = _find_trials(config.sweep)
    settings = {name: _prediction_settings(config, trial["export"]) for name, trial in trials.items()}
    found: dict[float, list[Mapping[str, Interval]]] = {rho: [] for rho in sorted({t["rho"] for t in trials.values()})}
    for name, of_trial in settings.items():
        output = join(absolute_output(config.output), name)
        predict_pairs(of_trial, output)
        samples = labelled_temperatures(read_table(output, ["key", *MODALITIES]), of_trial.images.source, config.label)
        found[trials[name]["rho"]].append(correlate(samples, config.label))
    figures = {noun: f"Spearman(τ of {noun}, {config.label})" for noun in MODALITIES.values()}
    points: dict[float, dict[str, Interval]] = {}
    for rho, rows in found.items():
        means = {noun: mean_interval([row[noun].mean for row in rows]) for noun in figures}
        points[rho] = {name: rows[0][noun] if len(rows) == 1 else means[noun] for noun, name in figures.items()}
    low, high = min(points), max(points)
    conclusion = "; ".join(
        f"{name} is {show(points[low][name])} at ρ = {low:g} and {show(points[high][name])} at ρ = {high:g}"
        for name in figures.values()
    )
    publish_curves(
        config,
        f"τ and {config.label} over ρ",
        "ρ",
        points,
        uri=uri,
        values={"num_trials": len(trials)},
        conclusion=f"{conclusion}; {len(trials)} trials",
        plot_file="phase.png",
        is_logarithmic=low > 0,
        metrics={f"spearman_{noun}": points[high][name].mean for noun, name in figures.items()},
        settings={name: of_trial.record() for name, of_trial in settings.items()},
        source=config.images,
    )
    return points


def _find_trials(sweep: str) -> dict[str, Mapping[str, Any]]:
    """Return name → outcome of every trial that is finished and has TempNets."""
    filesystem, path = resolve(sweep)
    if filesystem.get_file_info(path).type is not FileType.Directory:
        raise FileNotFoundError(f"sweep = {sweep}: there is no such directory")
    names = sorted(entry.base_name for entry in filesystem.get_file_info(FileSelector(path)) if not entry.is_file)
    outcomes = {name: read_json(join(join(sweep, name), "outcome.json")) for name in names}
    trials: dict[str, Mapping[str, Any]] = {
        name: outcome
        for name, outcome in outcomes.items()
        if outcome is not None and outcome.get("rho") is not None and "num_pairs_train" in outcome
    }
    if len({outcome["rho"] for outcome in trials.values()}) < 2:
        raise ValueError(
            f"sweep = {sweep} has {len(trials)} finished trials of dual encoders with a ρ: at least 2 values of ρ are needed"
        )
    return trials


_TITLE = "τ of pairs with noisy captions"
_MIN_PAIRS = 2
"""Number of pairs that every group needs, for an interval."""

Groups = Mapping[str, np.ndarray]
"""Name of a group → which pairs (n,) belong to it."""


def analyse_noise(config: Noise) -> dict[str, Any]:
    """Run or continue the analysis, and return its figures."""
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    noise = CaptionNoise(share=config.share, seed=config.seed)
    settings = replace(_prediction_settings(config, config.model), noise=noise)
    temperatures = join(absolute_output(config.output), "temperatures")
    predict_pairs(settings, temperatures)
    table = read_table(temperatures, ["id", "key", *MODALITIES])
    numbers = match_numbers(table["key"].to_pylist(), settings.images.source, config.label)
    groups = group_pairs(table["id"].to_numpy(), numbers, noise)
    tau = {noun: table[name].to_numpy().astype(np.float64) for name, noun in MODALITIES.items()}
    image = np.unique(table["key"].to_numpy(), return_inverse=True)[1]
    values = figures(groups, tau, image)
    rows = [["group", "pairs", *(f"mean τ of {noun}" for noun in tau)]]
    rows += [
        [name, f"{int(chosen.sum())}", *(show(_mean(of_kind, chosen, image)) for of_kind in tau.values())]
        for name, chosen in groups.items()
    ]
    publish_findings(
        config,
        _TITLE,
        uri=uri,
        values=values,
        table=markdown_table(rows),
        conclusion=conclude_noise(values),
        plot_file="noise.png",
        plot=partial(plot, groups, tau),
        metrics={f"noisy_minus_clean_{noun}": values["differences"][noun]["mean"] for noun in tau},
        settings={"analysis": _TITLE, "label": config.label, **settings.record()},
        source=config.images,
    )
    return values


def group_pairs(ids: np.ndarray, numbers: np.ndarray, noise: CaptionNoise) -> Groups:
    """Return which pairs are clean, noisy, and both noisy and above the median of the label."""
    is_noisy = np.array([noise.selects(int(pair)) for pair in ids], dtype=bool)
    is_frequent = numbers > np.nanmedian(numbers)
    groups = {"clean": ~is_noisy, "noisy": is_noisy, "noisy and frequent": is_noisy & is_frequent}
    if small := [f"{name} {int(chosen.sum())}" for name, chosen in groups.items() if chosen.sum() < _MIN_PAIRS]:
        raise ValueError(f"images: every group needs {_MIN_PAIRS} pairs; of {len(ids)} pairs are {', '.join(small)}")
    return groups


def _mean(tau: np.ndarray, chosen: np.ndarray, image: np.ndarray) -> Interval:
    return mean_interval(tau[chosen], torch.from_numpy(image[chosen]))


def figures(groups: Groups, tau: Mapping[str, np.ndarray], image: np.ndarray) -> dict[str, Any]:
    """Return the mean τ of every group, and the difference between noisy and clean pairs, with 95 % half-widths.

    `tau` holds τ (n,) of every pair, for images and for captions; `image` (n,) is the number of its image. Pairs of one image
    are not independent, so that a mean has the interval over images; the noise is, so that a difference has that over pairs.
    """
    rows = [
        {
            "group": name,
            "num_pairs": int(chosen.sum()),
            **{noun: _mean(of_kind, chosen, image).as_json() for noun, of_kind in tau.items()},
        }
        for name, chosen in groups.items()
    ]
    noisy, clean = groups["noisy"], groups["clean"]
    differences = {noun: difference_interval(of_kind[noisy], of_kind[clean]) for noun, of_kind in tau.items()}
    return {"groups": rows, "differences": {noun: interval.as_json() for noun, interval in differences.items()}}


def conclude_noise(values: Mapping[str, Any]) -> str:
    parts = []
    for noun, difference in values["differences"].items():
        mean, half = difference["mean"], difference["half_width"]
        word = "higher" if mean > half else "lower" if mean < -half else "not seen to differ"
        parts.append(f"τ of noisy pairs' {noun} is {word} ({mean:+.2g} ± {half:.1g})")
    return "; ".join(parts)


def plot(groups: Groups, tau: Mapping[str, np.ndarray], path: Path) -> None:
    with picture(path, len(tau), figsize=(7, 1 + 2.4 * len(tau)), title=_TITLE) as rows:
        for axes, (noun, of_kind) in zip(rows[:, 0], tau.items(), strict=True):
            edges = np.histogram_bin_edges(of_kind, bins=40)
            for name, chosen in groups.items():
                label = f"{name} ({int(chosen.sum())})"
                axes.hist(of_kind[chosen], bins=edges, density=True, histtype="step", label=label)
            axes.set(xlabel=f"τ of {noun}", ylabel="density")
        rows[0, 0].legend(fontsize=8)
