"""The configuration of `jobs.reproduce`, that is, its command line."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from jobs.engine.config import RunSection, TrackingSection
from jobs.engine.fields import FREE_TO_CHANGE, absolute_path, named_values
from jobs.studies.reproduction.experiments import Scale, find

# Fields that an experiment sets itself for each of its runs, and what the user should set instead.
_OWN_FIELDS = {
    "run.name": "--name is the name of the whole experiment",
    "run.seed": "--seeds sets the number of seeds",
    "run.storage": "use --storage",
    "run.prepared": "use --storage",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceConfig:
    """The experiment, its scale, and changes to it."""

    experiment: Annotated[str, tyro.conf.Positional]
    """Id of the experiment: a table or figure of a paper."""
    scale: Scale = "small"
    """Scale. small: minutes on two CPU cores with the sample data; full: the scale of the paper."""
    seeds: int = 3
    """Number of seeds, that is, runs per arm. Runs that were made with fewer seeds before are used again."""
    steps: int | None = None
    """Maximum number of training steps of every run. None: the experiment's own numbers."""
    arms: tuple[str, ...] = ()
    """Run only these rows of the table (and the runs that they start from). Empty: all rows."""
    change: tuple[str, ...] = ()
    """Changes to the configuration of all runs, as FIELD=VALUE: data.train=DIR temperature.gamma=0.2. An arm's own
    changes take precedence."""
    data: tuple[str, ...] = ()
    """Data that models are scored on, as NAME=PATH: senteval=DIR, wikitext=FILE. A dry run shows the names."""
    num_concurrent: int = field(default=0, metadata=FREE_TO_CHANGE)
    """Maximum number of runs at a time. 0: as many as fit into the cluster."""
    name: str = ""
    """Name of the results' directory in storage. Default: reproduce-EXPERIMENT-SCALE, with a digest of any settings
    that are not the defaults."""
    storage: str = field(default="", metadata=FREE_TO_CHANGE)
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
        """Name and storage as the section that training runs use, checked by the same rules."""
        run = RunSection(name=self.name or self._default_name, storage=self.storage)
        _ = run.resolved_storage
        return run

    @property
    def _default_name(self) -> str:
        settings = {name: getattr(self, name) for name in ("seeds", "steps", "arms", "change", "data")}
        defaults = {item.name: item.default for item in dataclasses.fields(self)}
        unusual = {name: value for name, value in settings.items() if value != defaults[name]}
        name = f"reproduce-{find(self.experiment).id}-{self.scale}"
        if not unusual:
            return name
        return f"{name}-{hashlib.blake2b(json.dumps(unusual).encode(), digest_size=3).hexdigest()}"

    @property
    def changes(self) -> dict[str, Any]:
        """`section.field` → value; numbers, True, None and the like are read as Python literals, all else as text."""
        changes = {
            name.replace("-", "_"): _parse_value(text) for name, text in named_values("change", self.change).items()
        }
        if own := changes.keys() & _OWN_FIELDS.keys():
            name = min(own)
            raise ValueError(f"change: {name} cannot be changed, as it tells runs apart: {_OWN_FIELDS[name]}")
        return changes

    @property
    def paths(self) -> dict[str, str]:
        """Name → path of the data that models are scored on."""
        return {name: absolute_path(path) for name, path in named_values("data", self.data).items()}


def _parse_value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return absolute_path(text)
