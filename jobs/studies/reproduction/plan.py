"""The plan of an experiment before anything is run: its runs, their cost, and the data that they need.

The name of a run consists of its preset, a digest of everything that identifies it, and the seed, so experiments share
equal runs.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.engine.config import TrainingConfig
from jobs.engine.fields import check_fields, configuration_hash, flat_fields, flatten, with_fields
from jobs.engine.masking import masked
from jobs.engine.report import markdown_table
from jobs.engine.tracking import resolve_uri
from jobs.studies.reproduction.config import ReproduceConfig
from jobs.studies.reproduction.cost import PRESETS, cost_of
from jobs.studies.reproduction.experiments import Arm, Experiment, Scale, Study, find
from jobs.tasks.classifier.config import CrossValidationConfig
from pipelines.storage import read_json

# Settings of small runs: one thread per run, so that several runs fit side by side.
_SMALL_WORKERS = {"workers.num_workers": 1, "workers.cpus_per_worker": 0.7, "workers.num_threads": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    number: int
    """Number of the seed, from 0."""
    seed: int
    fold: int = 0

    @property
    def name(self) -> str:
        """Name of the replicate, which is the same for all arms."""
        return f"{self.number}.{self.fold}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    arm: Arm
    replicate: Replicate
    config: TrainingConfig
    after: str
    """Name of the run that this one starts from; empty if there is none."""

    @property
    def name(self) -> str:
        return self.config.run.name


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStudy:
    """A study with its runs."""

    study: Study
    runs: list[Run]
    """Runs of all arms and replicates; two arms may share a run."""

    @property
    def test_share(self) -> float:
        """n_test/n_train, as in `jobs.studies.estimates.estimate`: of k folds 1/(k − 1), else 0."""
        num_folds = 1 + max((run.replicate.fold for run in self.runs), default=0)
        return 1.0 / (num_folds - 1) if num_folds > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    config: ReproduceConfig
    experiment: Experiment
    studies: list[PlannedStudy]
    tracking_uri: str
    """URI of the MLflow store; empty if nothing is tracked."""

    @property
    def num_left_out(self) -> int:
        """Number of the claim's statements that are left out because not all of their arms were requested."""
        whole = sum(len(study.statements) for study in self.experiment.studies[self.config.scale])
        return whole - sum(len(planned.study.statements) for planned in self.studies)

    @property
    def runs(self) -> dict[str, Run]:
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
            others = f"; the others take {cost_of(left).describe()}" if left else ""
            lines.append(f"{'runs':<12} {len(runs)}, {finished if left else 'all'} of them finished before{others}")
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
    """Make the configurations of all runs, which needs no data; errors name the field, its value and the legal values."""
    experiment = find(config.experiment)
    storage = config.run.resolved_storage
    uri = resolve_uri(config.tracking, storage)
    common: dict[str, Any] = {"run.storage": f"{storage}/reproduced", "run.prepared": f"{storage}/prepared"}
    tracking = {**dataclasses.asdict(config.tracking), "uri": uri, "enabled": bool(uri)}
    del tracking["preset"], tracking["paper"]  # these are taken from the runs' own presets
    common |= {f"tracking.{name}": value for name, value in tracking.items()}
    if config.scale == "small":
        common |= _SMALL_WORKERS
    studies = [
        PlannedStudy(study=study, runs=_make_runs(study, config, common))
        for study in _select_arms(experiment.studies[config.scale], config.arms)
    ]
    work = Reproduction(config=config, experiment=experiment, studies=studies, tracking_uri=uri)
    if unknown := sorted(config.paths.keys() - work.scoring_data.keys()):
        known = (
            ", ".join(work.scoring_data) or "no data; the data that runs read are fields: use --change data.FIELD=PATH"
        )
        raise ValueError(f"data: {experiment.id} is not scored on {unknown[0]!r}: it is scored on {known}")
    if (config.changes or config.steps) and not work.runs:
        raise ValueError(f"change, steps: {experiment.id} trains nothing, so there is nothing to change")
    check_fields(config.changes, [run.config for run in work.runs.values()])
    return work


def _preset_of(arm: Arm, scale: Scale) -> str:
    return f"{arm.preset}-small" if scale == "small" else arm.preset


def _replicates_of(arm: Arm, preset: Any, num_seeds: int) -> list[Replicate]:
    """Returns the seeds 0, 1, … of an arm; for a cross-validation its own seeds, each with every fold."""
    if not isinstance(preset, CrossValidationConfig):
        return [Replicate(number=number, seed=number) for number in range(num_seeds)]
    grid = preset.grid
    if num_seeds > len(grid.seeds):
        raise ValueError(f"seeds = {num_seeds}: {arm.preset} has the {len(grid.seeds)} seeds of its paper")
    return [
        Replicate(number=number, seed=grid.seeds[number], fold=fold)
        for number, fold in itertools.product(range(num_seeds), range(grid.num_folds))
    ]


def _make_runs(study: Study, job: ReproduceConfig, common: Mapping[str, Any]) -> list[Run]:
    """Returns all runs of a study, each after the run it starts from; a run that arms share is listed for each of them.

    The changes of `job` apply to the runs that have the field, before the arms' own changes, but no run has more steps than
    `job.steps`; `common` is for all runs.
    """
    runs: dict[tuple[str, str], Run] = {}
    for arm in study.arms:
        if not arm.preset:
            continue
        name = _preset_of(arm, job.scale)
        preset = PRESETS[name]()
        setting = preset.grid.settings[-1] if isinstance(preset, CrossValidationConfig) else None
        for replicate in _replicates_of(arm, preset, job.seeds):
            # A base that many runs start from is trained once per seed, not once per fold.
            base = runs[arm.after, f"{replicate.number}.0"] if arm.after else None
            start = {"model.path": base.config.run.export_directory} if base else {}
            config: TrainingConfig = preset
            if setting is not None:
                config = preset.cell("", setting, replicate.seed, replicate.fold)
            known = flatten(config)
            changes = {field: value for field, value in job.changes.items() if field in known}
            changes = {"run.seed": replicate.seed, **common, **study.changes, **changes, **start, **arm.changes}
            config = with_fields(config, changes)
            if job.steps and job.steps < config.run.num_steps:
                config = with_fields(config, {"run.num_steps": job.steps})
                if job.scale == "small" and "validation.every" not in job.changes:
                    config = with_fields(config, {"validation.every": max(1, job.steps // 4)})
            if job.scale == "small":  # keep only one checkpoint, at the end
                config = with_fields(
                    config, {"run.checkpoint_every": config.run.num_steps, "run.num_checkpoints_kept": 1}
                )
            digest = configuration_hash(with_fields(config, {"run.name": "run"}))[:8]
            config = with_fields(config, {"run.name": f"{name}-{digest}-seed{replicate.seed}"})
            runs[arm.name, replicate.name] = Run(
                arm=arm, replicate=replicate, config=config, after=base.name if base else ""
            )
    return list(runs.values())


def outcome_of(run: Run) -> Mapping[str, Any] | None:
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


def _select_arms(studies: list[Study], names: tuple[str, ...]) -> list[Study]:
    """Returns the studies with the named arms, those that they start from, and the statements about only these."""
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
                _preset_of(arm, config.scale) if arm.preset else "–",
                " ".join([*shown, *after]),
                f"{runs[0].config.run.num_steps:,}" if runs else "–",
                f"{config.seeds} measurements" if planned.study.direct else str(len(runs)),
            ]
        )
    return markdown_table(rows)


def list_needed_paths(configs: Sequence[TrainingConfig]) -> dict[str, list[str]]:
    """Returns field → paths of the data and models that runs read and that none of these runs makes."""
    made = {config.run.export_directory for config in configs}
    paths: dict[str, list[str]] = {}
    for config in configs:
        for name, value, metadata in flat_fields(config):
            if metadata.get("is_path") and value and value not in made and value not in paths.setdefault(name, []):
                paths[name].append(value)
    return {name: values for name, values in paths.items() if values}
