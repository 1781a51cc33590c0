"""The plan of an experiment before anything is run: its runs, their cost, and the data that they need.

The name of a run consists of its preset, a digest of everything that identifies it, and the seed, so experiments share
equal runs.

The estimated cost is that of the papers' timings if they give them (TempNet Tables 1 and 14), else of FLOPs at 40 % of the
312 TFLOP/s of an A100: 6·N·D for N trained parameters and D tokens, 2·N·D through a frozen base, and for images 3 times the
forward FLOPs of their tower.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.engine.config import TrainingConfig
from jobs.engine.fields import check_fields, configuration_hash, flat_fields, flatten, with_fields
from jobs.engine.masking import masked
from jobs.engine.report import markdown_table
from jobs.engine.tracking import resolve_uri
from jobs.studies.reproduction.config import ReproduceConfig
from jobs.studies.reproduction.experiments import Arm, Experiment, Scale, Study, find
from jobs.tasks.classifier.config import ClassifierConfig, CrossValidationConfig
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.image_encoder.config import ImageEncoderConfig
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.presets import classifiers, clip, images, language_models, sentences
from jobs.tasks.sentence_encoder.config import SentenceConfig
from pipelines.storage import read_json

PRESETS: dict[str, Callable[[], Any]] = {
    **language_models.PRESETS,
    **clip.PRESETS,
    **sentences.PRESETS,
    **images.PRESETS,
    **classifiers.PRESETS,
}
"""Preset name → function that returns its configuration, for all jobs; the names are distinct."""

# Settings of small runs: one thread per run, so that several runs fit side by side.
_SMALL_WORKERS = {"workers.num_workers": 1, "workers.cpus_per_worker": 0.7, "workers.num_threads": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    arm: Arm
    number: int
    """Number of the seed, from 0."""
    fold: int
    config: TrainingConfig
    after: str
    """Name of the run that this one starts from; empty if there is none."""

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def replicate(self) -> str:
        """Name of the seed and fold, which is the same for all arms."""
        return f"{self.number}.{self.fold}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStudy:
    """A study with its runs."""

    study: Study
    runs: list[Run]
    """Runs of all arms and replicates; two arms may share a run."""

    @property
    def test_share(self) -> float:
        """n_test/n_train, as in `jobs.studies.estimates.estimate`: of k folds 1/(k − 1), else 0."""
        num_folds = 1 + max((run.fold for run in self.runs), default=0)
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
        scorings = [planned.study.scoring for planned in self.studies if planned.study.scoring]
        named = {name: path for scoring in scorings for name, path in scoring.data.items()}
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
            others = f"; the others take {describe_cost(left)}" if left else ""
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


def _first_configs(arm: Arm, preset: Any, num_seeds: int) -> dict[tuple[int, int], TrainingConfig]:
    """Return (number of the seed, fold) → configuration: seeds 0, 1, …, or those of a cross-validation with every fold."""
    if not isinstance(preset, CrossValidationConfig):
        return {(number, 0): with_fields(preset, {"run.seed": number}) for number in range(num_seeds)}
    grid = preset.grid
    if num_seeds > len(grid.seeds):
        raise ValueError(f"seeds = {num_seeds}: {arm.preset} has the {len(grid.seeds)} seeds of its paper")
    return {
        (number, fold): preset.cell("", grid.settings[-1], grid.seeds[number], fold)
        for number, fold in itertools.product(range(num_seeds), range(grid.num_folds))
    }


def _make_runs(study: Study, job: ReproduceConfig, common: Mapping[str, Any]) -> list[Run]:
    """Return all runs of a study, each after the run it starts from; a run that arms share is listed for each of them.

    The changes of `job` apply to the runs that have the field, before the arms' own changes; `common` is for all runs.
    """
    runs: dict[tuple[str, int, int], Run] = {}
    for arm in study.arms:
        if not arm.preset:
            continue
        name = _preset_of(arm, job.scale)
        for (number, fold), config in _first_configs(arm, PRESETS[name](), job.seeds).items():
            # A base that many runs start from is trained once per seed, not once per fold.
            base = runs[arm.after, number, 0] if arm.after else None
            start = {"model.path": base.config.run.export_directory} if base else {}
            known = flatten(config)
            changes = {field: value for field, value in job.changes.items() if field in known}
            config = with_fields(config, {**common, **study.changes, **changes, **start, **arm.changes})
            if job.steps and job.steps < config.run.num_steps:
                config = with_fields(config, {"run.num_steps": job.steps})
                if job.scale == "small" and "validation.every" not in job.changes:
                    config = with_fields(config, {"validation.every": max(1, job.steps // 4)})
            if job.scale == "small":  # keep only one checkpoint, at the end
                last = {"run.checkpoint_every": config.run.num_steps, "run.num_checkpoints_kept": 1}
                config = with_fields(config, last)
            digest = configuration_hash(with_fields(config, {"run.name": "run"}))[:8]
            config = with_fields(config, {"run.name": f"{name}-{digest}-seed{config.run.seed}"})
            after = base.name if base else ""
            runs[arm.name, number, fold] = Run(arm=arm, number=number, fold=fold, config=config, after=after)
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
            statements = tuple(one for one in study.statements if {arm for arm, _ in one.weights} <= wanted)
            selected.append(dataclasses.replace(study, arms=arms, statements=statements))
    return selected


def _list_arms(planned: PlannedStudy, config: ReproduceConfig) -> str:
    rows = [["arm", "preset", "changed", "steps", "runs"]]
    for arm in planned.study.arms:
        runs = [run for run in planned.runs if run.arm.name == arm.name]
        changes = {**planned.study.changes, **config.changes, **arm.changes}
        hidden = ("run.num_steps", "validation.")
        shown = [f"{name}={value}" for name, value in changes.items() if not name.startswith(hidden)]
        after = [f"after {arm.after}"] if arm.after else []
        preset = _preset_of(arm, config.scale) if arm.preset else "–"
        steps = f"{runs[0].config.run.num_steps:,}" if runs else "–"
        number = f"{config.seeds} measurements" if planned.study.direct else str(len(runs))
        rows.append([arm.name, preset, " ".join([*shown, *after]), steps, number])
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


# ---- cost ------------------------------------------------------------------------------------------------------------


_A100_FLOPS = 312e12
_UTILIZATION = 0.4

# Number of parameters, in millions, of the models that full-scale presets start from.
_MILLIONS = {
    "EleutherAI/pythia-160m": 162.0, "huggyllama/llama-7b": 6_738.0,
    "meta-llama/Llama-2-7b-hf": 6_738.0, "meta-llama/Llama-2-7b-chat-hf": 6_738.0,
    "meta-llama/Llama-2-13b-hf": 13_016.0, "meta-llama/Llama-2-13b-chat-hf": 13_016.0,
    "meta-llama/Llama-2-70b-chat-hf": 68_977.0, "distilbert/distilroberta-base": 82.0,
    "FacebookAI/roberta-base": 125.0, "FacebookAI/roberta-large": 355.0,
}  # fmt: skip
_GPT2_MILLIONS = 124.4

# Forward GFLOPs of one image of 224 × 224 pixels and one caption: ResNet-50 with DistilBERT (30 tokens), CLIP ViT-B/32
# (77 tokens).
_PAIR_GFLOPS = {"microsoft/resnet-50": 8.2 + 2 * 0.066 * 30, "openai/clip-vit-base-patch32": 8.8 + 2 * 0.063 * 77}

# Forward GFLOPs of one image of 224 × 224 pixels through a ResNet-18.
_IMAGE_GFLOPS = 3.6

# Beginning of a preset's name → GPU-hours per step, and the source of the timing.
_PAPER_HOURS = {
    "gpt2-scratch": (1.28 * 8 / 10_000, "Table 14: 1.28 h for 10 000 steps on 8 A6000"),
    "clip-cc3m": (2.42 * 8 / 10_000, "Table 14: 2.42 h for 10 000 steps on 8 A6000"),
    "llama2-7b-frozen": (3.98 * 8 / 10_000, "Table 14: 3.98 h for 10 000 steps on 8 A6000"),
    "llama2-13b-frozen": (10.33 * 8 / 10_000, "Table 14: 10.33 h for 10 000 steps on 8 A6000"),
    "llama2-chat-7b-frozen": (1.42 / 30_000, "Table 1: 1.42 A100-hours for 30 000 steps"),
    "llama2-chat-13b-frozen": (3.68 / 30_000, "Table 1: 3.68 A100-hours for 30 000 steps"),
    "llama2-chat-70b-frozen": (11.4 / 20_000, "Table 1: 11.4 A100-hours for 20 000 steps"),
}

# Rough core-seconds per step of the small presets with their validations, and of the start of a run, from runs that were
# made two at a time on two cores.
_SMALL_SECONDS = {
    LanguageModelConfig: 0.6,
    ClipConfig: 0.35,
    SentenceConfig: 0.25,
    ClassifierConfig: 0.1,
    ImageEncoderConfig: 0.2,
}
_SMALL_START = 6.0


def describe_cost(configs: Sequence[TrainingConfig]) -> str:
    """Return the cost of all these runs together, and what the estimate is based on."""
    if any(config.workers.use_gpu for config in configs):
        parts, unit = [_estimate_full(config) for config in configs], "GPU-hours"
        hours, bases = sum(hours for hours, _ in parts), list(dict.fromkeys(basis for _, basis in parts))
    else:
        hours = sum(_SMALL_START + config.run.num_steps * _SMALL_SECONDS[type(config)] for config in configs) / 3600
        bases, unit = ["a rough estimate from the pace of the small presets on two busy cores"], "core-hours"
    amount = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
    return f"about {amount} {unit} ({'; '.join(bases)})"


def _estimate_full(config: TrainingConfig) -> tuple[float, str]:
    for start, (hours, basis) in _PAPER_HOURS.items():
        if config.run.name.startswith(start):
            return hours * config.run.num_steps, basis
    flops = _flops_per_step(config) * config.run.num_steps
    return flops / (_UTILIZATION * _A100_FLOPS) / 3600, f"FLOPs at {_UTILIZATION:.0%} of an A100's 312 TFLOP/s"


def _flops_per_step(config: TrainingConfig) -> float:
    size = config.optimizer.batch_size
    if isinstance(config, ClipConfig):
        preset = _preset_config(config).model
        start = config.model.path or config.model.image_path
        forward = (_PAIR_GFLOPS.get(start) or _PAIR_GFLOPS[preset.path or preset.image_path]) * 1e9
        return size * forward * (1 if config.model.freeze else 3)
    if isinstance(config, ImageEncoderConfig):
        return 3 * 2 * size * _IMAGE_GFLOPS * 1e9 * (config.model.image_size / 224) ** 2
    if isinstance(config, LanguageModelConfig):
        num_parameters = 1e6 * (_millions(config, config.model.path) if config.model.path else _GPT2_MILLIONS)
        return (2 if config.model.is_frozen else 6) * num_parameters * size * config.data.context_length
    if isinstance(config, SentenceConfig):
        # The mean lengths of spans are min_length plus the mean of Beta(4, 2) (anchors) or Beta(2, 4) (positives) times
        # the width.
        data, width = config.data, config.data.max_length - config.data.min_length
        anchor, positive = data.min_length + width * 4 / 6, data.min_length + width * 2 / 6
        tokens = data.num_anchors * (anchor + data.num_positives * positive)
        return 6 * 1e6 * _millions(config, config.model.path) * size * tokens
    assert isinstance(config, ClassifierConfig)
    return 6 * 1e6 * _millions(config, config.model.path) * size * config.data.num_tokens


def _millions(config: TrainingConfig, path: str) -> float:
    """Returns the parameters, in millions, of the model at a path; for an unknown path, those of the preset's model."""
    return _MILLIONS.get(path) or _MILLIONS.get(_preset_config(config).model.path, _GPT2_MILLIONS)


def _preset_config(config: TrainingConfig) -> Any:
    return PRESETS[max((name for name in PRESETS if config.run.name.startswith(f"{name}-")), key=len)]()
