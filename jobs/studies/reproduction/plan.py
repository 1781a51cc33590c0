"""The plan of an experiment before anything is run: its runs, their cost, and the data that they need."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.engine.description import markdown_table
from jobs.engine.identity import check_fields
from jobs.engine.masking import masked
from jobs.engine.tracking import resolve_uri
from jobs.studies.reproduction.config import ReproduceConfig
from jobs.studies.reproduction.cost import cost_of
from jobs.studies.reproduction.experiment import Experiment, Study
from jobs.studies.reproduction.experiments.registry import find
from jobs.studies.reproduction.runs import Run, find_test_share, list_needed_paths, make_runs, preset_of
from pipelines.storage import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStudy:
    """A study with its runs."""

    study: Study
    runs: list[Run]
    """Runs of all arms and replicates; two arms may share a run."""
    test_share: float
    """n_test/n_train, as in `jobs.studies.estimates.estimate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """The plan that a configuration leads to."""

    config: ReproduceConfig
    experiment: Experiment
    studies: list[PlannedStudy]
    tracking_uri: str
    """URI of the MLflow store; empty if nothing is tracked."""

    @property
    def num_left_out(self) -> int:
        """Number of the claim's statements that are left out because not all of their arms were requested."""
        whole = sum(len(study.statements) for study in self.experiment.studies(self.config.scale))
        return whole - sum(len(planned.study.statements) for planned in self.studies)

    @property
    def runs(self) -> dict[str, Run]:
        """Name → run, for all studies."""
        return {run.name: run for planned in self.studies for run in planned.runs}

    @property
    def scoring_data(self) -> dict[str, str]:
        """Name → path of the data that models are scored on, for all studies."""
        named = {
            name: path
            for planned in self.studies
            if planned.study.scoring
            for name, path in planned.study.scoring.data.items()
        }
        return named | {name: path for name, path in self.config.paths.items() if name in named}

    def describe(self) -> str:
        """Returns the plan as text for the terminal."""
        config, experiment, runs = self.config, self.experiment, list(self.runs.values())
        finished = sum(outcome_of(run) is not None for run in runs)
        lines = [
            f"{experiment.id:<12} {experiment.title} ({experiment.source})",
            f"{'claim':<12} {experiment.claim}",
            f"{'results':<12} {config.run.directory}",
            f"{'MLflow':<12} {masked(self.tracking_uri) or 'off'}",
        ]
        if runs:
            left = [run.config for run in runs if outcome_of(run) is None]
            lines.append(
                f"{'runs':<12} {len(runs)}, {finished} of them finished before; the others take {cost_of(left).describe()}"
                if left
                else f"{'runs':<12} {len(runs)}, all of them finished before"
            )
        for planned in self.studies:
            lines += ["", f"{planned.study.title}:", _list_arms(planned, config)]
            lines += [f"note: {note}" for note in planned.study.notes]
        data = list_needed_paths([run.config for run in runs])
        data |= {f"--data {name}": [path] for name, path in self.scoring_data.items() if path}
        if data:
            lines += ["", "data:"]
            lines += [f"  {name:<26} {path}  ({locate(name, path)})" for name, paths in data.items() for path in paths]
        return "\n".join(lines)


def make_reproduction(config: ReproduceConfig) -> Reproduction:
    """Make the configurations of all runs; this needs no data.

    Raises:
        ValueError, ConnectionError: naming the field, its value and the legal values.
    """
    experiment = find(config.experiment)
    storage = config.run.resolved_storage
    uri = resolve_uri(config.tracking, storage)
    tracking = {**dataclasses.asdict(config.tracking), "uri": uri, "enabled": bool(uri)}
    del tracking["preset"], tracking["paper"]  # these are taken from the runs' own presets
    studies = [
        PlannedStudy(
            study=study,
            runs=make_runs(
                study,
                config.scale,
                config.seeds,
                directory=f"{storage}/reproduced",
                prepared=f"{storage}/prepared",
                tracking=tracking,
                overrides=config.changes,
            ),
            test_share=find_test_share(study, config.scale),
        )
        for study in _select_arms(experiment.studies(config.scale), config.arms)
    ]
    work = Reproduction(config=config, experiment=experiment, studies=studies, tracking_uri=uri)
    if unknown := sorted(config.paths.keys() - work.scoring_data.keys()):
        known = (
            ", ".join(work.scoring_data) or "no data; the data that runs read are fields: use --change data.FIELD=PATH"
        )
        raise ValueError(f"data: {experiment.id} is not scored on {unknown[0]!r}: it is scored on {known}")
    if config.changes and not work.runs:
        raise ValueError(f"change, steps: {experiment.id} trains nothing, so there is nothing to change")
    check_fields(config.changes, [run.config for run in work.runs.values()])
    return work


def outcome_of(run: Run) -> Mapping[str, Any] | None:
    """Returns the outcome of a finished run, else None."""
    return read_json(f"{run.config.run.directory}/outcome.json")


def locate(name: str, path: str) -> str:
    """Returns, as text for the user, whether a path exists; tokenizers and models may be on the hub."""
    if "://" in path:
        return "a URI"
    if Path(path).exists():
        return "found"
    may_be_on_hub = name.startswith("model.") or name == "data.tokenizer"
    is_hub_name = path.count("/") <= 1 and not path.startswith(("/", ".", "data", "runs"))
    return "from the hub" if may_be_on_hub and is_hub_name else "MISSING"


def _select_arms(studies: Iterable[Study], names: tuple[str, ...]) -> list[Study]:
    """Returns the studies restricted to the named arms.

    The arms that these start from are kept, too, as are the statements about only the kept arms. Studies without a
    named arm are left out.
    """
    studies = list(studies)
    if not names:
        return studies
    known = list(dict.fromkeys(arm.name for study in studies for arm in study.arms))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
            raise ValueError(f"arms: {name!r} is unknown: did you mean {' or '.join(map(repr, near))}?")
    selected = []
    for study in studies:
        wanted = {arm.name for arm in study.arms if arm.name in names}
        wanted |= {arm.after for arm in study.arms if arm.name in wanted}
        if wanted & set(names):
            arms = tuple(arm for arm in study.arms if arm.name in wanted)
            statements = tuple(
                statement for statement in study.statements if {arm for arm, _ in statement.weights} <= wanted
            )
            selected.append(dataclasses.replace(study, arms=arms, statements=statements))
    return selected


def _list_arms(planned: PlannedStudy, config: ReproduceConfig) -> str:
    rows = [["arm", "preset", "changed", "steps", "runs"]]
    for arm in planned.study.arms:
        runs = [run for run in planned.runs if run.arm.name == arm.name]
        changes = {**planned.study.changes, **config.changes, **arm.changes}
        shown = [
            f"{name}={value}"
            for name, value in changes.items()
            if not name.startswith(("run.num_steps", "validation."))
        ]
        after = [f"after {arm.after}"] if arm.after else []
        rows.append(
            [
                arm.name,
                preset_of(arm, config.scale) if arm.preset else "–",
                " ".join([*shown, *after]),
                f"{runs[0].config.run.num_steps:,}" if runs else "–",
                str(len(runs)) if runs else f"{config.seeds} measurements",
            ]
        )
    return markdown_table(rows)
