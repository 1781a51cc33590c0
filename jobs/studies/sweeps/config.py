"""The configuration of a sweep: what is trained, which fields vary, and which temperatures are looked for."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from jobs.engine.config import RunSection, TrainingConfig
from jobs.engine.fields import (
    FREE_TO_CHANGE,
    added_later,
    check_not_negative,
    find_duplicate,
    flat_fields,
    may_differ,
    named_values,
    with_fields,
)
from jobs.studies.sweeps.band_search import (
    PRIOR_FALL,
    PRIOR_SLOPE,
    Point,
    Search,
    list_corners,
    search_band,
    search_grid,
    search_randomly,
)
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.language_model.config import LanguageModelConfig

Base = TypeVar("Base", bound=TrainingConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSection:
    """Which fields vary, and what the sweep looks for."""

    axes: tuple[str, ...]
    """Fields to vary, as FIELD=VALUE,VALUE,…, which are numeric fields of the base: temperature.rho=9,10
    optimizer.learning_rate_base=1e-4,1e-5."""
    search: Literal["band", "grid", "random", "optuna"] = "grid"
    """grid: every combination of the values. random: num_trials points, each value drawn between the axis's smallest
    and largest value (log-uniformly if the largest is at least 10 times the smallest, else uniformly). band:
    searches the first axis, between its smallest and largest value, for the value that brings the mean temperature
    into the band; then the other axes' values there by successive halving; then continues from the best point. It
    stops trials early that cannot end in the band. optuna: Ray Tune's OptunaSearch, if the package is installed."""
    num_trials: int = 8
    """Number of trials of a random search, or of optuna."""
    budget: float = 4.0
    """Budget of a band search, in whole trials' worth of steps, never exceeded; 4 is a quarter of a grid of 16."""
    seed: int = 0
    """Random seed of a random search. The seed of the training runs is base.run.seed."""
    band: tuple[float, float] = (0.7, 1.0)
    """Lower and upper bound of the band in which the mean temperature of the validation should lie."""
    scheduler: Literal["asha", "pbt", "median", "none"] = dataclasses.field(default="none", metadata=FREE_TO_CHANGE)
    """Scheduler of Ray Tune that ends trials of a grid or random search early. none: nothing does. asha: ASHAScheduler,
    which ends those whose loss is above the median when half of their steps are done. median: MedianStoppingRule, which
    compares averages after every validation from then on. With both, trials whose mean temperature cannot end in the band
    any more are ended too. pbt: PopulationBasedTraining. The points of the search train for num_generations equal parts of
    their steps; after each of these one of the worst trials goes on from the checkpoint of one of the best, with values
    multiplied by 0.8 or 1.2."""
    num_generations: int = dataclasses.field(default=4, metadata=added_later(4))
    """Number of generations of population based training."""
    num_side_by_side: int = dataclasses.field(default=16, metadata=FREE_TO_CHANGE)
    """Maximum number of trials that a grid or random search on a frozen base (a language model, or the towers of a dual
    encoder) trains side by side, on the same hidden states or embeddings. 1: every trial is a run of its own."""
    num_concurrent: int = dataclasses.field(default=0, metadata=FREE_TO_CHANGE)
    """Maximum number of trials at a time. 0: as many as fit into the cluster."""

    def __post_init__(self) -> None:
        _ = self.values
        if not 0.0 < self.band[0] < self.band[1]:
            raise ValueError(f"sweep.band = {self.band} must be two rising positive numbers")
        for name, least in (("num_trials", 1), ("num_side_by_side", 1), ("num_generations", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"sweep.{name} = {getattr(self, name)} must be at least {least}")
        check_not_negative("sweep", self, "num_concurrent")
        if not 1.0 <= self.budget < math.inf:
            raise ValueError(f"sweep.budget = {self.budget:g} must be at least 1, for one whole trial, and finite")
        if self.search == "optuna" and importlib.util.find_spec("optuna") is None:
            raise ValueError(
                "sweep.search = optuna needs the package optuna, which is not installed: choose band, grid or random"
            )
        if self.scheduler != "none" and self.search == "band":
            raise ValueError(
                f"sweep.scheduler = {self.scheduler}, but sweep.search = band ends trials by rules of its own: choose grid "
                "or random, or scheduler none"
            )
        if self.scheduler == "pbt" and self.search == "optuna":
            raise ValueError(
                "sweep.scheduler = pbt changes values itself, but so does sweep.search = optuna: choose grid"
            )
        compares = "search = band" if self.search == "band" else f"scheduler = {self.scheduler}"
        if compares != "scheduler = none" and len(set(self.values.get("run.num_steps", ()))) > 1:
            raise ValueError(
                f"sweep.{compares} compares trials after the same number of steps, but sweep.axes varies run.num_steps: "
                "leave that axis out, or choose a grid with scheduler none"
            )

    @property
    def values(self) -> dict[str, list[float]]:
        """Field → values."""
        values_by_name = {}
        axes = named_values(
            "sweep.axes", [axis.replace("-", "_", axis.partition("=")[0].count("-")) for axis in self.axes]
        )
        for name, text in axes.items():
            try:
                values = [float(value) for value in text.split(",")]
            except ValueError as error:
                raise ValueError(f"sweep.axes: {name}={text} is not FIELD=VALUE,VALUE,… in numbers") from error
            if not all(map(math.isfinite, values)):
                raise ValueError(f"sweep.axes: {name}={text} must be finite")
            if again := find_duplicate(f"{value:.12g}" for value in values):
                raise ValueError(f"sweep.axes: {name} lists {again} twice")
            values_by_name[name] = values
        if not values_by_name:
            raise ValueError("sweep.axes is empty: name a field and its values")
        return values_by_name

    @property
    def length(self) -> float:
        """Length of the sweep in whole trials; for a band search, its maximum."""
        if self.search == "band":
            return self.budget
        return math.prod(map(len, self.values.values())) if self.search == "grid" else self.num_trials

    @property
    def max_num_trials(self) -> int:
        """Number of trials; for a band search its maximum, since it stops no trial before half of its steps."""
        return int(self.length * (2 if self.search == "band" else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig(Generic[Base]):
    """A sweep; its name, directory and experiment are those of the base configuration."""

    base: Base
    sweep: SweepSection

    def __post_init__(self) -> None:
        for name, _, metadata in flat_fields(self.base):
            # Such a value is not recorded either, so that the runs would not be found by it.
            if name in self.sweep.values and metadata.get("is_free_to_change"):
                raise ValueError(f"sweep.axes: {name} does not change the outcome of a run")
        # The corners come first, as the user typed their values; if a point between them is invalid, one of the corners
        # is too.
        for point in [*list_corners(self.sweep.values), *next(self.start())]:
            trial = with_values(self.base, point)
            if self.sweep.search == "band" or self.sweep.scheduler != "none":
                self._check_band(trial)
            if self.sweep.scheduler in ("asha", "median"):
                self._check_validations(trial)
            if self.sweep.scheduler == "pbt":
                self._check_generations(trial)

    def _check_band(self, trial: Base) -> None:
        temperature: Any = trial.temperature  # type: ignore[attr-defined]  # both kinds have it
        low, high = temperature.tau_range
        if not temperature.has_free_tau:
            if self.sweep.search != "band":
                return
            raise ValueError(
                f"sweep.search = band, but with temperature.loss = {temperature.loss} no temperature is learned: choose grid "
                "or random, or another loss"
            )
        if not low < self.sweep.band[0] < self.sweep.band[1] < high:
            raise ValueError(
                f"sweep.band = {self.sweep.band} must lie between τ₀ = {low:g} and τ_max = {high:g}, where the mean can be"
            )

    def _check_validations(self, trial: Base) -> None:
        every, num_steps = trial.validation.every, trial.run.num_steps
        if every > num_steps // 2:
            raise ValueError(
                f"sweep.scheduler = {self.sweep.scheduler} compares trials at a validation in the second half of their "
                f"{num_steps} steps, but validation.every = {every} may leave none there: choose at most {num_steps // 2}"
            )

    def _check_generations(self, trial: Base) -> None:
        sweep, every, num_steps = self.sweep, trial.validation.every, trial.run.num_steps
        # Runs that differ in the others can take over each other's checkpoints.
        fixed = [name for name in sweep.values if _kind(self.base, name) != "float" or not may_differ(name, 0.0, 1.0)]
        if fixed:
            raise ValueError(
                f"sweep.scheduler = pbt changes values while a model is trained, but {fixed[0]} shapes its weights or orders "
                "its data: leave that axis out, or choose scheduler none"
            )
        if sweep.length < 2:
            raise ValueError(
                "sweep.scheduler = pbt needs at least 2 runs, but the search has 1 point: give more values"
            )
        longest = num_steps // sweep.num_generations
        if every > longest:
            raise ValueError(
                f"sweep.scheduler = pbt compares runs in each of {sweep.num_generations} parts of their {num_steps} steps, "
                f"but validation.every = {every} may leave no validation there: choose at most {longest}"
            )

    @property
    def run(self) -> RunSection:
        """Name and storage of the sweep as a whole."""
        return self.base.run

    def start(self, value: float | None = None) -> Search:
        """Returns the search from its beginning; a band search first tries `value` on the first axis."""
        sweep = self.sweep
        if sweep.search == "grid":
            return search_grid(sweep.values)
        if sweep.search in ("random", "optuna"):  # optuna chooses its own points, which these only stand for
            return search_randomly(sweep.values, num_trials=sweep.num_trials, seed=sweep.seed, whole=self.whole_axes)
        return search_band(
            sweep.values, band=sweep.band, budget=sweep.budget, start=value, slope=self.slope, whole=self.whole_axes
        )

    @property
    def whole_axes(self) -> set[str]:
        """Names of the axes whose values are whole numbers."""
        return {name for name in self.sweep.values if _kind(self.base, name) == "int"}

    @property
    def slope(self) -> float:
        """Prior of d log τ̄ / d value along the first axis of a band search."""
        first, values = next(iter(self.sweep.values.items()))
        width = max(values) - min(values)
        return PRIOR_SLOPE if first == "temperature.rho" or not width else PRIOR_FALL / width

    def trial(self, point: Point) -> Base:
        """Returns the configuration of the run at a point; its directory is within that of the sweep."""
        return place_trial(with_values(self.base, point), self.run, name_of(point))


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelSweep(SweepConfig[LanguageModelConfig]):
    """A sweep of `jobs.train_lm`."""

    base: LanguageModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSweep(SweepConfig[ClipConfig]):
    """A sweep of `jobs.train_clip`."""

    base: ClipConfig


def name_of(point: Mapping[str, float]) -> str:
    """Returns the name of the run at a point, such as rho2.5-learning_rate_base0.003."""
    return "-".join(f"{field.rpartition('.')[2]}{value:.12g}" for field, value in point.items())


def with_values(config: Base, point: Mapping[str, float]) -> Base:
    """Return a configuration with the values of a point; ValueError names the axis of one that is no number."""
    values: dict[str, float | int] = {}
    for name, value in point.items():
        kind = _kind(config, name)
        if kind not in ("int", "float"):
            raise ValueError(f"sweep.axes: {name} is not a number but {kind}")
        if kind == "int" and value != int(value):
            raise ValueError(f"sweep.axes: {name} = {value:g} must be a whole number")
        values[name] = int(value) if kind == "int" else value
    try:
        return with_fields(config, values)
    except ValueError as error:
        raise ValueError(f"sweep.axes: {error}") from error


def place_trial(config: Base, sweep: RunSection, name: str, start_from: str = "") -> Base:
    """Returns the configuration of a trial: with a name, in the directory of a sweep, whose prepared data it shares."""
    run = dataclasses.replace(
        config.run, name=name, storage=sweep.directory, prepared=sweep.prepared_directory, start_from=start_from
    )
    return dataclasses.replace(config, run=run)


def _kind(config: TrainingConfig, name: str) -> str:
    """Returns int or float for a numeric field, even if it may be None, and the full type for any other field."""
    section, _, field = name.rpartition(".")
    kinds = {item.name: str(item.type) for item in dataclasses.fields(getattr(config, section, config))}
    kind = kinds.get(field, "float")  # a field that does not exist is refused when it is set
    if kind.split(" ")[0] == "int":
        return "int"
    return "float" if "float" in kind else kind
