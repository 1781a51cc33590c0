"""The configuration of a sweep: what is trained, which of its fields vary, and what is looked for."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from jobs.clip.config import ClipConfig
from jobs.language_models.config import LanguageModelConfig
from jobs.named_values import named_values, twice
from jobs.sweeps import search
from jobs.sweeps.search import Point, Search
from jobs.training.config import RunSection, TrainingConfig
from jobs.training.identity import flatten

Base = TypeVar("Base", bound=TrainingConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSection:
    """Which fields vary, and what is looked for."""

    axes: tuple[str, ...]
    """FIELD=VALUE,VALUE,…: numeric fields of the base: temperature.rho=9,10 optimizer.learning_rate_base=1e-4,1e-5."""
    search: Literal["grid", "random", "band"] = "grid"
    """grid: every combination. random: num_trials combinations of values drawn between the smallest and the largest of each
    axis, evenly, or in proportion where the largest is 10 times the smallest or more. band: the value of the first axis,
    between its smallest and largest, that brings the mean temperature into the band; then the others' values there, by
    successive halving; trials that cannot end in the band are cut short."""
    num_trials: int = 8
    """Of a random search; of a band search, at most."""
    seed: int = 0
    """Of a random search; the runs' own is base.run.seed."""
    band: tuple[float, float] = (0.7, 1.0)
    """Where the mean temperature of validation should lie."""
    num_concurrent: int = 0
    """Trials at a time. 0: as many as the cluster has room for."""

    def __post_init__(self) -> None:
        _ = self.values
        if not 0.0 < self.band[0] < self.band[1]:
            raise ValueError(f"sweep.band = {self.band} must be two rising positive numbers")
        if self.num_trials < 1:
            raise ValueError(f"sweep.num_trials = {self.num_trials} must be at least 1")
        if self.num_concurrent < 0:
            raise ValueError(f"sweep.num_concurrent = {self.num_concurrent} must not be negative")

    @property
    def values(self) -> dict[str, list[float]]:
        """Field → values.

        Raises:
            ValueError: for what is no list of numbers.
        """
        found = {}
        for name, text in named_values("sweep.axes", self.axes).items():
            try:
                values = [float(value) for value in text.split(",")]
            except ValueError as error:
                raise ValueError(f"sweep.axes: {name}={text} is not FIELD=VALUE,VALUE,… in numbers") from error
            if not all(map(math.isfinite, values)):
                raise ValueError(f"sweep.axes: {name}={text} must be finite")
            if again := twice(text.split(",")):
                raise ValueError(f"sweep.axes: {name} has {again} twice")
            found[name.replace("-", "_")] = values
        if not found:
            raise ValueError("sweep.axes is empty: name a field and its values")
        return found

    @property
    def max_num_trials(self) -> int:
        """How many trials there are, or at most."""
        return math.prod(map(len, self.values.values())) if self.search == "grid" else self.num_trials

    def start(self, value: float | None = None) -> Search:
        """The search, from its beginning; a band search begins at `value` of the first axis."""
        if self.search == "grid":
            return search.grid(self.values)
        if self.search == "random":
            return search.random(self.values, num_trials=self.num_trials, seed=self.seed)
        return search.band(self.values, band=self.band, num_trials=self.num_trials, start=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig(Generic[Base]):
    """A sweep; its name, directory and experiment are those of the base."""

    base: Base
    sweep: SweepSection

    def __post_init__(self) -> None:
        for point in [*next(self.sweep.start()), *search.corners(self.sweep.values)]:
            _ = self.trial(point)

    @property
    def run(self) -> RunSection:
        """Name and place of the whole."""
        return self.base.run

    def trial(self, point: Point) -> Base:
        """The run that a point makes, in a directory within that of the sweep; prepared data are shared.

        Raises:
            ValueError: naming the axis, for a field that is not there or is no number, or a value that is refused.
        """
        name = "-".join(f"{field.rpartition('.')[2]}{value:.6g}" for field, value in point.items())
        config = with_fields(self.base, point)
        run = dataclasses.replace(
            config.run, name=name, storage=self.run.directory, prepared=self.run.prepared_directory
        )
        return dataclasses.replace(config, run=run)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelSweep(SweepConfig[LanguageModelConfig]):
    """Of `jobs.train_lm`."""

    base: LanguageModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSweep(SweepConfig[ClipConfig]):
    """Of `jobs.train_clip`."""

    base: ClipConfig


def with_fields(config: Base, values: dict[str, float]) -> Base:
    """A configuration with some fields, named by section and field, set to numbers.

    Raises:
        ValueError: naming the axis, and the nearest names for a field that is not there.
    """
    known = flatten(config)
    by_section: dict[str, dict[str, float | int]] = {}
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            raise ValueError(f"sweep.axes: there is no field {name}: did you mean {' or '.join(near) or 'another'}?")
        if name.startswith("run.") and field != "seed" and field != "num_steps":
            raise ValueError(f"sweep.axes: {name} does not change what a run gives")
        kind = next(item.type for item in dataclasses.fields(getattr(config, section)) if item.name == field)
        is_whole = str(kind).split(" ")[0] == "int"
        if not is_whole and "float" not in str(kind):
            raise ValueError(f"sweep.axes: {name} is no number but {kind}")
        if is_whole and value != int(value):
            raise ValueError(f"sweep.axes: {name} = {value:g} must be a whole number")
        by_section.setdefault(section, {})[field] = int(value) if is_whole else value
    try:
        sections: dict[str, Any] = {
            section: dataclasses.replace(getattr(config, section), **fields) for section, fields in by_section.items()
        }
        return dataclasses.replace(config, **sections)
    except ValueError as error:
        raise ValueError(f"sweep.axes: {error}") from error
