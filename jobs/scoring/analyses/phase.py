"""The analysis `phase`: how the rank correlation of τ with a number beside the images depends on ρ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pyarrow.fs import FileSelector, FileType

from jobs.engine.tracking import resolve_uri
from jobs.scoring.analyses.config import Phase
from jobs.scoring.analyses.curves import Curves, collect, show
from jobs.scoring.results import Findings, absolute_output, publish_findings
from jobs.scoring.temperatures.config import PredictPairTemperaturesConfig
from jobs.scoring.temperatures.pages import MODALITIES, correlate, labelled_temperatures
from jobs.scoring.temperatures.pairs import PairPredictionSettings, predict_pairs, resolve_settings
from jobs.scoring.units import UnitStore
from pipelines.images.archives import list_image_archives
from pipelines.images.labels import read_numbers
from pipelines.images.temperature_table import read_table
from pipelines.storage import join, read_json, resolve
from tempnet.intervals import Interval, mean_interval


def analyse_phase(config: Phase) -> Curves:
    """Run or continue the analysis: every trial of the sweep predicts the temperatures of all pairs.

    Where trials have the same ρ, shown are means over them with intervals over trials; otherwise the interval is that over
    samples.

    Raises:
        FileNotFoundError, ValueError: before any work starts, if the sweep has no finished trials of dual encoders with
            TempNets at two values of ρ, or the images lack the label.
        ScoringFailedError: naming what failed.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    output = absolute_output(config)
    trials = _find_trials(config.sweep)
    settings = {name: _prediction_settings(config, trial["export"]) for name, trial in trials.items()}
    source = next(iter(settings.values())).images.source
    next(read_numbers(source, list_image_archives(source), config.label))  # one sample with it is enough to begin
    correlations = {name: _predict(config, of_trial, join(output, name)) for name, of_trial in settings.items()}
    figures = [f"Spearman(τ of {noun}, {config.label})" for noun in MODALITIES.values()]

    def at(rho: float) -> Mapping[str, Interval]:
        rows = [correlations[name] for name, trial in trials.items() if trial["rho"] == rho]
        return {
            name: _combine([row[noun] for row in rows]) for name, noun in zip(figures, MODALITIES.values(), strict=True)
        }

    curves = collect("ρ", sorted({trial["rho"] for trial in trials.values()}), figures, at)
    title = f"τ and {config.label} over ρ"
    findings = Findings(
        title=title,
        values=curves.values() | {"num_trials": len(trials)},
        table=curves.table(),
        conclusion=_conclude(curves, len(trials)),
        picture="phase.png",
        plot=partial(curves.plot, title, is_logarithmic=min(curves.xs) > 0),
        metrics={
            f"spearman_{noun}": curves.figures[name][-1][0]
            for name, noun in zip(figures, MODALITIES.values(), strict=True)
        },
        settings={"analysis": title, **{name: of_trial.record() for name, of_trial in settings.items()}},
        source=config.images,
    )
    publish_findings(config, findings, uri=uri)
    return curves


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


def _prediction_settings(config: Phase, model: str) -> PairPredictionSettings:
    return resolve_settings(
        PredictPairTemperaturesConfig(
            model=model,
            images=config.images,
            output=config.output,
            batch_size=config.batch_size,
            workers=config.workers,
        )
    )


def _predict(config: Phase, settings: PairPredictionSettings, output: str) -> dict[str, Interval]:
    """Predict the temperatures of all pairs by one trial's model, and return their rank correlations with the label."""
    UnitStore(output).claim(settings.record())
    predict_pairs(settings, output, config.workers)
    table = read_table(output, ["key", *MODALITIES])
    return correlate(labelled_temperatures(table, settings.images.source, config.label), config.label)


def _combine(rows: Sequence[Interval]) -> Interval:
    return rows[0] if len(rows) == 1 else mean_interval([r for r, _ in rows])


def _conclude(curves: Curves, num_trials: int) -> str:
    """Return one line with the rank correlation at the smallest and the largest ρ."""
    parts = [
        f"{name} is {show(points[0])} at ρ = {curves.xs[0]:g} and {show(points[-1])} at ρ = {curves.xs[-1]:g}"
        for name, points in curves.figures.items()
    ]
    return f"{'; '.join(parts)}; {num_trials} trials"
