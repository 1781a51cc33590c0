"""The configuration of a classifier's cross-validation, which the user gives, and of its cells, which are trained.

A cell is one training run of the cross-validation: one setting of the loss, with one seed, on one fold.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

from jobs.engine.config import EncoderSection, RunSection, TrackingSection, TrainingConfig
from jobs.engine.fields import (
    FREE_TO_CHANGE,
    PATH,
    added_later,
    check_not_negative,
    check_positive,
    check_share,
    find_duplicate,
    values_of,
    with_absolute_paths,
)
from pipelines.sentences.senteval import FINE_TUNED_NAMES, TASK_NAMES, check_task, present_tasks
from tempnet.soft_triple import SoftTripleConfig, SoftTripleOptions, check_contrastive


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSection:
    """The labelled sentences: tasks of SentEval, or a file of your own."""

    directory: str = field(default="", metadata=PATH)
    """Directory in SentEval's layout (MR/, CR/, SUBJ/, MPQA/, SST/, TREC/, MRPC/), which may also hold IMDb's `aclImdb/` or
    `aclImdb_v1.tar.gz`. Give either this or `file`."""
    tasks: tuple[str, ...] = ()
    """Tasks to train on: IMDb or SentEval's MR, CR, SUBJ, MPQA, SST2, SST5, TREC, MRPC, SNLI, SICKEntailment or a probing
    task. If a task has a training split, only its training sentences are divided into folds. If empty: those of
    TripleEntropy (MR, CR, SUBJ, MPQA, IMDb, SST2, TREC, MRPC) that are found in `directory`."""
    file: str = field(default="", metadata=PATH)
    """File with your own data instead of `directory`: one example per line, as label, tab, sentence and, for pairs,
    another tab and the second sentence."""
    classes: tuple[str, ...] = ()
    """Labels to use from `file`; lines with other labels are counted and left out. If empty: all labels that occur."""
    num_examples: int = 0
    """Number of sentences to use, drawn in proportion to the classes, as in TREC-1k. 0: all sentences."""
    seed: int = 0
    """Random seed for drawing num_examples sentences."""
    tokenizer: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of a Transformers fast tokenizer. If empty: the tokenizer of model.path."""
    num_tokens: int = 128
    """Maximum number of tokens per sentence; longer sentences are truncated and counted."""
    max_bad_share: float = 0.01
    """Largest share of unreadable lines, in [0, 1], that is tolerated; above it the job fails."""

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.directory):
            raise ValueError("data: give either data.directory, in SentEval's layout, or data.file")
        for name in self.tasks:
            check_task(name, TASK_NAMES, "data.tasks: ")
        if again := find_duplicate(self.tasks):
            raise ValueError(f"data.tasks names {again!r} twice")
        if self.file and self.tasks:
            raise ValueError(f"data.tasks = {self.tasks} is for data.directory, and data.file is given")
        if self.classes and not self.file:
            raise ValueError("data.classes is for data.file: SentEval's tasks have their own")
        check_not_negative("data", self, "num_examples")
        check_positive("data", self, "num_tokens")
        check_share("data", self, "max_bad_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierModelSection(EncoderSection):
    """The model: pretrained weights to start from, or the sizes of a randomly initialised one."""

    path: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of any Transformers text model, which gets a new classification head. If empty: a randomly
    initialised RoBERTa."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CentersSection:
    """The class centres of SoftTriple: options shared by all settings of TripleEntropy (`tempnet.soft_triple`)."""

    learning_rate: float = 1e-2
    """Peak learning rate of the centres."""
    regularizer: float = 0.0
    """Weight of SoftTriple's own regulariser, which merges centres of the same class. 0: no regulariser."""
    with_padding: bool = False
    """Treat padding as tokens of the sentence in the loss, as the authors' code does."""

    def __post_init__(self) -> None:
        check_positive("centers", self, "learning_rate")
        check_not_negative("centers", self, "regularizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSection(SoftTripleOptions):
    """One setting of the loss; see `GridSection` for the meaning of the values."""

    cross_entropy_alone: bool = False
    """Plain fine-tuning by cross-entropy; the other fields of this section are ignored."""
    contrastive_weight: float = field(default=0.0, metadata=added_later(0.0))
    """λ, the weight of the supervised contrastive loss, in [0, 1], that takes the place of SoftTriple. 0: SoftTriple."""
    contrastive_temperature: float = field(default=0.3, metadata=added_later(0.3))
    """τ of the supervised contrastive loss."""

    @property
    def name(self) -> str:
        """Name of the setting: `ce` for cross-entropy alone, else its values."""
        if self.cross_entropy_alone:
            return "ce"
        if self.contrastive_weight:
            return f"supcon-weight{self.contrastive_weight:g}-tau{self.contrastive_temperature:g}"
        values = {"k": self.num_centers, "gamma": self.gamma, "scale": self.scale, "margin": self.margin}
        return "-".join(f"{name}{value:g}" for name, value in (values | {"beta": self.beta}).items())


_CONTRASTIVE = ("contrastive_weight", "contrastive_temperature")


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSection:
    """The grid of settings of TripleEntropy, all combinations of which are tried, and the folds and seeds."""

    num_centers: tuple[int, ...] = (2000,)
    """Values of K, the number of centres per class."""
    gamma: tuple[float, ...] = (0.1,)
    """Values of γ, the temperature of the softmax over the centres of a class."""
    scale: tuple[float, ...] = (3.3,)
    """Values of λ, the scale of the class similarities in the softmax."""
    margin: tuple[float, ...] = (0.3,)
    """Values of δ, the margin subtracted from the similarity to the right class."""
    beta: tuple[float, ...] = (0.9,)
    """Values of β, the weight of the cross-entropy, in [0, 1]; 1 is cross-entropy alone."""
    contrastive_weight: tuple[float, ...] = field(default=(), metadata=added_later(()))
    """Values of λ, the weight of the supervised contrastive loss beside cross-entropy, above 0 and at most 1 (Gunel et al.
    2021; the best there is 0.9): settings of their own beside TripleEntropy's. Empty: none."""
    contrastive_temperature: tuple[float, ...] = field(default=(0.3,), metadata=added_later((0.3,)))
    """Values of τ of the supervised contrastive loss."""
    with_baseline: bool = True
    """Also train with cross-entropy alone, on the same folds and with the same seeds."""
    seeds: tuple[int, ...] = (2, 16, 128, 2048)
    """Random seeds, each of which determines the folds, the initial weights, dropout and the order of the data."""
    num_folds: int = 5
    """Number of folds of the cross-validation, at least 2."""
    num_concurrent: int = field(default=0, metadata=FREE_TO_CHANGE)
    """Number of cells trained at the same time. 0: as many as fit into the cluster."""
    keep_models: bool = False
    """Keep the checkpoint and the exported classifier of every cell."""

    def __post_init__(self) -> None:
        settings = (*(item.name for item in dataclasses.fields(SoftTripleOptions)), *_CONTRASTIVE)
        for name in (*settings, "seeds"):
            values = getattr(self, name)
            if not values and name != "contrastive_weight":
                raise ValueError(f"grid.{name} is empty: give at least one value")
            if again := find_duplicate(map(str, values)):
                raise ValueError(f"grid.{name} names {again} twice")
        if 0.0 in self.contrastive_weight:
            raise ValueError("grid.contrastive_weight = 0 is cross-entropy alone: use grid.with_baseline")
        for setting in self.settings:
            try:
                _ = soft_triple_config(setting, CentersSection())
                check_contrastive(setting.contrastive_weight, setting.contrastive_temperature)
            except ValueError as error:
                raise ValueError(f"grid.{error}") from error
        if self.num_folds < 2:
            raise ValueError(f"grid.num_folds = {self.num_folds} must be at least 2")
        check_not_negative("grid", self, "num_concurrent")

    @property
    def settings(self) -> list[SettingSection]:
        """All settings of the grid: the baseline, if requested, and every combination of the values of each loss."""
        triple = [item.name for item in dataclasses.fields(SoftTripleOptions)]
        combinations = [
            SettingSection(**dict(zip(names, values, strict=True)))
            for names in (_CONTRASTIVE, triple)
            for values in itertools.product(*(getattr(self, name) for name in names))
        ]
        return [SettingSection(cross_entropy_alone=True)] * self.with_baseline + combinations


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSection:
    """The fold of a cell, which determines the held-out sentences."""

    task: str
    """Name of the SentEval task; empty for data from a file."""
    num_folds: int
    """Number of folds of the cross-validation."""
    fold: int
    """Number of the held-out fold, counted from 0."""
    keep_model: bool
    """Whether the trained classifier is exported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedConfig(TrainingConfig):
    """What a cross-validation and its cells have in common."""

    data: LabelledSection
    model: ClassifierModelSection = field(default_factory=ClassifierModelSection)
    centers: CentersSection = field(default_factory=CentersSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierConfig(_SharedConfig):
    """Configuration of one cell."""

    fold: FoldSection
    setting: SettingSection

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        if self.optimizer.micro_batch_size:
            raise ValueError(
                f"optimizer.micro_batch_size = {self.optimizer.micro_batch_size}: the mean over the tokens of a batch is not "
                "that of its parts' means; choose 0, and more workers or a smaller optimizer.batch_size if memory is short"
            )
        if self.workers.zero_stage == 3:
            raise ValueError("workers.zero_stage = 3: classifiers are trained with 0, 1 or 2")
        if not self.tokenizer:
            raise ValueError("data.tokenizer is empty, and there is no model.path to take one from")

    @property
    def tokenizer(self) -> str:
        """Directory, URI or hub name of the tokenizer."""
        return self.data.tokenizer or self.model.path


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossValidationConfig(_SharedConfig):
    """Configuration of the cross-validation of a classifier."""

    grid: GridSection = field(default_factory=GridSection)
    tracking: TrackingSection = field(default_factory=lambda: TrackingSection(experiment="classifiers"))

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        if self.run.seed:
            raise ValueError(f"run.seed = {self.run.seed}: the seeds of a cross-validation are grid.seeds")
        # Raises if a cell would refuse its configuration. Its storage is not resolved, as that of a preset may not be usable.
        _ = self._cell(self.run, "", self.grid.settings[0], 0)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks to cross-validate; a single empty name if the data are a file."""
        if self.data.file:
            return ("",)
        try:
            return self.data.tasks or present_tasks(self.data.directory, FINE_TUNED_NAMES)
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"data.directory: {error}") from error

    def cells(self) -> list[ClassifierConfig]:
        """Return the configurations of all cells, with the settings to be compared on the same fold next to each other."""
        grid = self.grid
        combinations = itertools.product(self.tasks, grid.seeds, range(grid.num_folds), grid.settings)
        return [self.cell(task, setting, seed, fold) for task, seed, fold, setting in combinations]

    def cell(self, task: str, setting: SettingSection, seed: int, fold: int) -> ClassifierConfig:
        """Return the configuration of a cell, in a subdirectory of the cross-validation's and with absolute paths."""
        name = "-".join(filter(None, (task, setting.name, f"seed{seed}", f"fold{fold}")))
        run = dataclasses.replace(self.run, name=name, storage=self.run.directory, seed=seed)
        return self._cell(run, task, setting, fold)

    def _cell(self, run: RunSection, task: str, setting: SettingSection, fold: int) -> ClassifierConfig:
        shared = {item.name: getattr(self, item.name) for item in dataclasses.fields(_SharedConfig)}
        paths = {"data": with_absolute_paths(self.data), "model": with_absolute_paths(self.model)}
        place = FoldSection(task=task, num_folds=self.grid.num_folds, fold=fold, keep_model=self.grid.keep_models)
        return ClassifierConfig(**shared | paths | {"run": run}, fold=place, setting=setting)


def soft_triple_config(setting: SettingSection, centers: CentersSection) -> SoftTripleConfig:
    """Return the configuration of the loss of a setting."""
    return SoftTripleConfig(regularizer=centers.regularizer, **values_of(setting, SoftTripleOptions))
