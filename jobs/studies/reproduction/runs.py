"""Turning an arm and a seed into the configuration of a training run, with a name by which it is found again.

The name consists of the preset, a digest of everything that identifies the run, and the seed, so experiments share
equal runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jobs.engine.config import TrainingConfig
from jobs.engine.identity import configuration_hash, flatten, with_fields
from jobs.engine.task import Plan
from jobs.studies.reproduction.experiment import Arm, Scale, Study
from jobs.tasks.classifier.config import ClassifierConfig, CrossValidationConfig
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.presets import classifiers, clip, language_models, sentences
from jobs.tasks.sentence_encoder.config import SentenceConfig

Config = TypeVar("Config", bound=TrainingConfig)

PRESETS: dict[str, Callable[[], Any]] = {
    **language_models.PRESETS,
    **clip.PRESETS,
    **sentences.PRESETS,
    **classifiers.PRESETS,
}
"""Preset name → function that returns its configuration, for all jobs; the names are distinct."""

SMALL_WORKERS = {"workers.num_workers": 1, "workers.cpus_per_worker": 0.7, "workers.num_threads": 1}
"""Settings of small runs: one thread per run, so that several runs fit side by side."""

_PATHS = (
    "data.train", "data.validation", "data.train_captions", "data.validation_captions", "data.directory", "data.file",
    "data.tokenizer", "model.path", "model.image_path", "model.text_path", "temperature.table",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """The source of randomness of a run: its seed and, in a cross-validation, its fold."""

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
    """A training run of a study."""

    arm: Arm
    replicate: Replicate
    config: TrainingConfig
    after: str
    """Name of the run that this one starts from; empty if there is none."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.config.run.name


def preset_of(arm: Arm, scale: Scale) -> str:
    """Returns the name of an arm's preset at a scale."""
    return f"{arm.preset}-small" if scale == "small" else arm.preset


def replicates_of(arm: Arm, scale: Scale, num_seeds: int) -> list[Replicate]:
    """Returns the replicates of an arm: the seeds 0, 1, …; for a cross-validation its own seeds, each with every fold.

    Raises:
        ValueError: if the cross-validation has fewer seeds than requested.
    """
    config = PRESETS[preset_of(arm, scale)]()
    if not isinstance(config, CrossValidationConfig):
        return [Replicate(number=number, seed=number) for number in range(num_seeds)]
    grid = config.grid
    if num_seeds > len(grid.seeds):
        raise ValueError(f"seeds = {num_seeds}: {arm.preset} has the {len(grid.seeds)} seeds of its paper")
    return [
        Replicate(number=number, seed=grid.seeds[number], fold=fold)
        for number, fold in itertools.product(range(num_seeds), range(grid.num_folds))
    ]


def find_test_share(study: Study, scale: Scale) -> float:
    """Returns n_test/n_train if the study's replicates are folds, else 0."""
    configs = [PRESETS[preset_of(arm, scale)]() for arm in study.arms if arm.preset]
    folds = [config.grid.num_folds for config in configs if isinstance(config, CrossValidationConfig)]
    return 1.0 / (folds[0] - 1) if folds else 0.0


def make_runs(
    study: Study,
    scale: Scale,
    num_seeds: int,
    *,
    directory: str,
    prepared: str,
    tracking: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> list[Run]:
    """Returns all runs of a study, each after the run it starts from; a run that arms share is listed for each of them.

    Args:
        study: the study.
        scale: small or full.
        num_seeds: number of seeds.
        directory: where the runs are stored.
        prepared: where prepared data are stored.
        tracking: fields of the section `tracking`.
        overrides: `section.field` → value, applied to the runs that have the field, before the arms' own changes.

    Raises:
        ValueError: naming a field that does not exist, or if a configuration is invalid.
    """
    runs: dict[tuple[str, str], Run] = {}
    common: dict[str, Any] = {"run.storage": directory, "run.prepared": prepared}
    common |= {f"tracking.{name}": value for name, value in tracking.items()}
    if scale == "small":
        common |= SMALL_WORKERS
    for arm in study.arms:
        if not arm.preset:
            continue
        for replicate in replicates_of(arm, scale, num_seeds):
            # A base that many runs start from is trained once per seed, not once per fold.
            base = runs[arm.after, f"{replicate.number}.0"] if arm.after else None
            start = {"model.path": base.config.run.export_directory} if base else {}
            preset = preset_of(arm, scale)
            config = _make_base_config(preset, replicate)
            known = flatten(config)
            known_overrides = {name: value for name, value in overrides.items() if name in known}
            config = with_fields(config, {**common, **study.changes, **known_overrides, **start, **arm.changes})
            config = _set_name(config, preset, replicate, is_small=scale == "small")
            runs[arm.name, replicate.name] = Run(
                arm=arm, replicate=replicate, config=config, after=base.name if base else ""
            )
    return list(runs.values())


def _make_base_config(preset: str, replicate: Replicate) -> TrainingConfig:
    config = PRESETS[preset]()
    if isinstance(config, CrossValidationConfig):
        config = config.cell("", config.grid.settings[-1], replicate.seed, replicate.fold)
    return with_fields(config, {"run.seed": replicate.seed})


def _set_name(config: Config, preset: str, replicate: Replicate, *, is_small: bool) -> Config:
    if is_small:  # keep only one checkpoint, at the end
        config = with_fields(config, {"run.checkpoint_every": config.run.num_steps, "run.num_checkpoints_kept": 1})
    digest = configuration_hash(with_fields(config, {"run.name": "run"}))[:8]
    return with_fields(config, {"run.name": f"{preset}-{digest}-seed{replicate.seed}"})


def find_planner(config: TrainingConfig) -> Callable[[Any], Plan]:
    """Returns the function that makes the plan of such a configuration."""
    # Imported here so that a dry run need not import Transformers.
    if isinstance(config, ClipConfig):
        from jobs.tasks.dual_encoder.plan import make_plan as make_clip_plan

        return make_clip_plan
    if isinstance(config, SentenceConfig):
        from jobs.tasks.sentence_encoder.plan import make_plan as make_sentence_plan

        return make_sentence_plan
    if isinstance(config, ClassifierConfig):
        from jobs.tasks.classifier.plan import make_plan as make_classifier_plan

        return make_classifier_plan
    from jobs.tasks.language_model.plan import make_plan as make_language_model_plan

    return make_language_model_plan


def list_needed_paths(configs: Sequence[TrainingConfig]) -> dict[str, list[str]]:
    """Returns field → paths of the data and models that runs read and that none of these runs makes."""
    made = {config.run.export_directory for config in configs}
    paths: dict[str, list[str]] = {}
    for config in configs:
        values = flatten(config)
        for name in _PATHS:
            value = values.get(name, "")
            if value and value not in made and value not in paths.setdefault(name, []):
                paths[name].append(value)
    return {name: values for name, values in paths.items() if values}
