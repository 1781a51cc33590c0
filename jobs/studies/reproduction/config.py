"""What a person may set for `jobs.reproduce`."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from jobs.engine.config import RunSection, TrackingSection, absolute_path
from jobs.engine.named_values import named_values
from jobs.studies.reproduction.experiment import Scale
from jobs.studies.reproduction.experiments.registry import find

# What an experiment sets for each of its runs, and how a person sets it instead.
_OWN_FIELDS = {
    "run.name": "--name is that of the whole",
    "run.seed": "--seeds says how many there are",
    "run.storage": "give --storage",
    "run.prepared": "give --storage",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceConfig:
    """An experiment, its scale, and what is changed of it."""

    experiment: Annotated[str, tyro.conf.Positional]
    """Table or figure."""
    scale: Scale = "small"
    """small: minutes on two CPU cores and the sample data; full: the paper's."""
    seeds: int = 3
    """Runs of every arm. What was run with fewer is found again."""
    steps: int | None = None
    """Of every run. None: those of the experiment."""
    arms: tuple[str, ...] = ()
    """Only these rows of the table (and what they start from). Empty: all."""
    change: tuple[str, ...] = ()
    """FIELD=VALUE, of all runs: data.train=DIR temperature.gamma=0.2; what an arm changes itself comes after it."""
    data: tuple[str, ...] = ()
    """NAME=PATH, of what models are scored on: senteval=DIR, wikitext=FILE; a dry run shows the names."""
    num_concurrent: int = 0
    """Runs at a time. 0: as many as the cluster has room for."""
    name: str = ""
    """Directory of the results in storage. Default: reproduce-EXPERIMENT-SCALE and, of what is not as usual, a digest."""
    storage: str = ""
    """Directory or URI that holds runs, prepared data and the MLflow store. Default: $TEMPNET_HOME, else ./runs."""
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="reproduce"))

    def __post_init__(self) -> None:
        _ = find(self.experiment)
        if self.seeds < 1:
            raise ValueError(f"seeds = {self.seeds} must be at least 1")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps = {self.steps} must be at least 1")
        if self.num_concurrent < 0:
            raise ValueError(f"num_concurrent = {self.num_concurrent} must not be negative")
        _ = self.changes, self.paths, self.run

    @property
    def run(self) -> RunSection:
        """Name and storage with the rules of training runs."""
        run = RunSection(name=self.name or self._usual_name, storage=self.storage)
        _ = run.resolved_storage
        return run

    @property
    def _usual_name(self) -> str:
        asked = {name: getattr(self, name) for name in ("seeds", "steps", "arms", "change", "data")}
        usual = {item.name: item.default for item in dataclasses.fields(self)}
        unusual = {name: value for name, value in asked.items() if value != usual[name]}
        name = f"reproduce-{find(self.experiment).id}-{self.scale}"
        if not unusual:
            return name
        return f"{name}-{hashlib.blake2b(json.dumps(unusual).encode(), digest_size=3).hexdigest()}"

    @property
    def changes(self) -> dict[str, Any]:
        """`section.field` → value: numbers, True, None and the like as Python writes them, all else as text."""
        found = {name.replace("-", "_"): _value(text) for name, text in named_values("change", self.change).items()}
        if own := found.keys() & _OWN_FIELDS.keys():
            name = min(own)
            raise ValueError(f"change: {name} is what tells runs apart: {_OWN_FIELDS[name]}")
        if self.steps is not None:
            found["run.num_steps"] = self.steps
            if self.scale == "small":
                found["validation.every"] = max(1, self.steps // 4)
        return found

    @property
    def paths(self) -> dict[str, str]:
        """Name → path."""
        return {name: absolute_path(path) for name, path in named_values("data", self.data).items()}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return absolute_path(text)
